"""Temperature sampling with log-probabilities: SGLang's ``Sampler.forward`` and our way around it.

Both run as the engine runs them, outside of CUDA graphs. Shape suffixes: B rows, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import measuring
from benchmarks.kernels.pair import DECODE, SHAPE, Pair

DEVICE = "cuda"
CALLS = 20
SPREAD = 3.0
"""Standard deviation of logits."""
TEMPERATURES = (1.0, 0.6, 1.3, 0.8)
APART = 3e-5
"""Between our logprobs and SGLang's; 9.5e-7 on an H200."""
OTHER_TOKENS = 0.001
"""Share of rows that may draw another token than SGLang's; none did on an H200."""


def pairs() -> Iterator[Pair]:
    """Every batch of a decode step, with a temperature of 1 as in training."""
    with _no_engine() as sampler:
        for rows in DECODE:
            yield pair(sampler, rows, SHAPE.vocab)


def pair(sampler: Any, rows: int, vocab: int) -> Pair:
    """One batch. SGLang's sampler writes probabilities over its logits, so each has its own."""
    ones, mixed = (_info(rows, vocab, mixed=mixed) for mixed in (False, True))
    logits_BV = torch.randn(rows, vocab, device=DEVICE) * SPREAD

    def check() -> None:
        for info in (ones, mixed):
            assert_alike(sampler, rows, vocab, info)

    return Pair(
        "sample + logprobs",
        str(rows),
        logits_BV.nbytes,
        check,
        [partial(_step, stock_sample, sampler, logits_BV.clone(), ones)] * CALLS,
        [partial(_step, our_sample, sampler, logits_BV, ones)] * CALLS,
        measuring.queued_us,
    )


def assert_alike(sampler: Any, rows: int, vocab: int, info: Any) -> None:
    """Check that a seed gives both the same tokens, logprobs and numbers after them.

    Raises:
        RuntimeError: it does not.
    """
    logits_BV = torch.randn(rows, vocab, device=DEVICE) * SPREAD
    found = []
    for sample in (stock_sample, our_sample):
        torch.manual_seed(0)
        found.append(
            (*_step(sample, sampler, logits_BV.clone(), info), torch.rand(1, device=DEVICE))
        )
    (theirs, their_logprobs, after), (mine, logprobs, ours_after) = found
    other = mine != theirs
    apart = float((logprobs - their_logprobs).masked_fill(other, 0.0).abs().max())
    others = int(other.sum())
    if apart > APART or others > max(1, OTHER_TOKENS * rows) or after != ours_after:
        raise RuntimeError(
            f"{others} of {rows} tokens are not those of SGLang's sampler, logprobs are "
            f"{apart:.1e} apart, and random numbers after them {float(after - ours_after):.1e}"
        )


def stock_sample(sampler: Any, *batch: Any) -> torch.Tensor:
    """SGLang's way."""
    tokens_B: torch.Tensor = type(sampler).forward(sampler, *batch)
    return tokens_B


def our_sample(sampler: Any, *batch: Any) -> torch.Tensor:
    """Ours, which must not leave the batch to SGLang."""
    from sgl_fp8rl.engine.layers.sampler import fast_sample

    tokens_B: torch.Tensor = fast_sample(_refuse, sampler, *batch)
    return tokens_B


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("our sampler left the batch to SGLang's")


def _step(
    sample: Any, sampler: Any, logits_BV: torch.Tensor, info: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logprobs."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    rows = len(logits_BV)
    output = LogitsProcessorOutput(next_token_logits=logits_BV)
    tokens_B = sample(sampler, output, info, True, [0] * rows, [None] * rows, torch.zeros(rows))
    return tokens_B, output.next_token_logprobs


def _info(rows: int, vocab: int, *, mixed: bool) -> Any:
    """A batch of requests that shape their distribution by temperature alone."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    one_B = torch.ones(rows, device=DEVICE)
    temperatures_B = torch.tensor(TEMPERATURES, device=DEVICE).repeat(rows)[:rows]
    return SamplingBatchInfo(
        temperatures=(temperatures_B if mixed else one_B).view(-1, 1),
        top_ps=one_B,
        top_ks=torch.full((rows,), 1 << 30, dtype=torch.int32, device=DEVICE),
        min_ps=torch.zeros_like(one_B),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=vocab,
        return_sampling_masks=[False] * rows,
        device=DEVICE,
    )


@contextmanager
def _no_engine() -> Iterator[Any]:
    """SGLang's sampler with the settings that an engine on one GPU with our quantization has."""
    from sglang.srt.layers import sampler as stock

    from sgl_fp8rl.constants import NAME
    from sgl_fp8rl.engine import compat

    arguments = SimpleNamespace(
        deterministic=SimpleNamespace(
            rl_on_policy_target=None, enable_deterministic_inference=False
        ),
        kernel=SimpleNamespace(sampling_backend="flashinfer"),
        features=SimpleNamespace(sampling_mask_max_tokens=8),
    )
    group = SimpleNamespace(device_group=None)
    parallel = SimpleNamespace(tp_group=group, attn_cp_size=1, attn_tp_group=group)
    settings = {
        "get_exec": arguments,
        "get_tp_group": group,
        "get_parallel": parallel,
        "is_dp_attention_enabled": False,
    }
    with ExitStack() as stack:
        for name, answer in settings.items():
            given = partial(lambda answer: answer, answer)
            # not every version asks for all of it
            stack.enter_context(patch.object(stock, name, given, create=True))
        model = SimpleNamespace(quantization=NAME)
        stack.enter_context(patch.object(compat, "get_model_args", lambda: model))
        yield stock.Sampler()
