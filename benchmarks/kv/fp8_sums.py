"""FP8 attention on Hopper beside float64 over the same codes: its outputs shrink with the context.

    pip install torch flashinfer-python sglang-kernel
    python fp8_sums.py

Needs nothing else of this repository. All values are E4M3 codes with scales of 1, so that no
rounding of inputs is measured. A shape: B sequences, S tokens of each, H KV heads, G query heads
of a KV head, N queries, D head dim.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
HEADS, GROUP, DIM, PAGE = 8, 4, 128, 64
"""32 query heads, 8 KV heads, as Qwen3-8B and Llama 3 8B have."""
WORKSPACE_BYTES = 512 << 20
SEEN_BY_CAUSAL = 128
"""Last tokens of a prompt, which prefill attends for."""


@dataclass(frozen=True)
class Case:
    """What is drawn."""

    batch: int
    context: int
    v_mean: float
    """Of V, in its standard deviations."""
    score_std: float = 1.0
    """Of scores, in nats; 0: all tokens have the same weight."""
    queries: int = 1
    """The last tokens of each sequence, under a causal mask."""


DECODE = [
    Case(batch, context, mean, std)
    for batch, context in ((128, 512), (64, 8192), (16, 30016), (4, 131072))
    for mean, std in ((0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (1.0, 0.0))
]
PREFILL = [
    Case(1, context, mean, std, SEEN_BY_CAUSAL)
    for context in (8192, 32768, 131072)
    for mean, std in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.0))
]


@dataclass(frozen=True)
class Inputs:
    """Codes: q [B * N, H * G, D]; k and v [B * S, H, D], one sequence after the other."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def draw(case: Case, device: str, seed: int = 0) -> Inputs:
    """The same values for the same seed on the same device."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device)

    tokens = case.batch * case.context
    q = (normal(case.batch * case.queries, HEADS * GROUP, DIM) * case.score_std).to(FP8)
    k = normal(tokens, HEADS, DIM).to(FP8)
    v = (normal(tokens, HEADS, DIM) + case.v_mean).to(FP8)
    return Inputs(case, q, k, v)


def oracle(inputs: Inputs) -> torch.Tensor:
    """Attention in float64: [B * N, H * G, D]."""
    case, parts = inputs.case, []
    at = torch.arange(case.context, device=inputs.q.device)
    hidden = at > at[-case.queries :, None]  # N x S
    q = inputs.q.double().view(case.batch, case.queries, HEADS, GROUP, DIM)
    for b in range(case.batch):
        mine = slice(b * case.context, (b + 1) * case.context)
        k, v = inputs.k[mine].double(), inputs.v[mine].double()
        for h in range(HEADS):
            scores = torch.einsum("ngd,sd->gns", q[b, :, h], k[:, h]) * DIM**-0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("gns,sd->ngd", weights, v[:, h]))
    out = torch.stack(parts).view(case.batch, HEADS, case.queries, GROUP, DIM)
    return out.transpose(1, 2).reshape(-1, HEADS * GROUP, DIM)


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2."""
    return float((out.double() - wanted).norm() / wanted.norm())


def bias(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Signed, relative: negative where outputs are too small."""
    off = (out.double() - wanted) * wanted.sign()
    return float(off.mean() / wanted.abs().mean())


def xqa(inputs: Inputs) -> torch.Tensor:
    """What SGLang's ``trtllm_mha`` calls to decode; on Hopper it is XQA, with FP8 products."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    case, device = inputs.case, inputs.q.device
    pages = torch.arange(len(inputs.k) // PAGE, dtype=torch.int32, device=device)
    caches = [x.view(-1, PAGE, HEADS, DIM).transpose(1, 2).contiguous() for x in _kv(inputs)]
    out: torch.Tensor = trtllm_batch_decode_with_kv_cache(
        query=inputs.q.bfloat16(),  # the kernel makes E4M3 of it, which loses nothing here
        kv_cache=(caches[0], caches[1]),
        workspace_buffer=torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        block_tables=pages.view(case.batch, -1),
        seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        max_seq_len=case.context,
        bmm1_scale=DIM**-0.5,
        bmm2_scale=1.0,
        kv_layout="HND",
    )
    return out


def fa2(inputs: Inputs) -> torch.Tensor:
    """The control: FlashInfer's FA2 decode, which makes BF16 of the same codes."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    case, device = inputs.case, inputs.q.device
    pages = case.context // PAGE
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_tensor_cores=True,
        backend="fa2",
    )
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * pages,
        torch.arange(case.batch * pages, dtype=torch.int32, device=device),
        torch.full((case.batch,), PAGE, dtype=torch.int32, device=device),
        HEADS * GROUP,
        HEADS,
        DIM,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=FP8,
        sm_scale=DIM**-0.5,
    )
    k, v = (x.view(-1, PAGE, HEADS, DIM) for x in _kv(inputs))
    out: torch.Tensor = wrapper.run(inputs.q.bfloat16(), (k, v))
    return out


def fa3(inputs: Inputs) -> torch.Tensor:
    """FA3 over the last tokens of a prompt, all operands E4M3, as SGLang calls it to prefill."""
    return _fa3(inputs, inputs.q, *_kv(inputs))


def fa3_bf16(inputs: Inputs) -> torch.Tensor:
    """The control: FA3 over the same values in BF16."""
    return _fa3(inputs, *(x.bfloat16() for x in (inputs.q, inputs.k, inputs.v)))


def _fa3(inputs: Inputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    case, device = inputs.case, q.device
    steps = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    out: torch.Tensor = flash_attn_with_kvcache(
        q=q,
        k_cache=k.view(-1, PAGE, HEADS, DIM),
        v_cache=v.view(-1, PAGE, HEADS, DIM),
        page_table=torch.arange(len(k) // PAGE, dtype=torch.int32, device=device).view(
            case.batch, -1
        ),
        cache_seqlens=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        cu_seqlens_q=steps * case.queries,
        max_seqlen_q=case.queries,
        softmax_scale=DIM**-0.5,
        causal=True,
    )
    return out


def _kv(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.k, inputs.v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("decode", "prefill"))
    only = parser.parse_args().only
    kernels: dict[str, tuple[list[Case], tuple[Callable[[Inputs], torch.Tensor], ...]]] = {
        "decode": (DECODE, (fa2, xqa)),
        "prefill": (PREFILL, (fa3_bf16, fa3)),
    }
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("| B x S, queries | V's mean / std | score std |", "kernel: error (bias) |")
    for name, (cases, arms) in kernels.items():
        for case in cases if only in (None, name) else ():
            inputs = draw(case, "cuda")
            wanted = oracle(inputs)
            cells = []
            for arm in arms:
                out = arm(inputs).view_as(wanted)
                cells.append(f"{arm.__name__}: {error(out, wanted):.2%} ({bias(out, wanted):+.2%})")
            shape = f"{case.batch} x {case.context}, {case.queries}"
            print("|", shape, "|", case.v_mean, "|", case.score_std, "|", ", ".join(cells), "|")
            del inputs, wanted
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
