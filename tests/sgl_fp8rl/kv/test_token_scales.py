"""An INT8 KV cache on the CPU platform: SGLang's own layers, backend and pool under our hooks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn

from sgl_fp8rl.engine.attention.kv_attention import folded_decode, folded_extend
from sgl_fp8rl.engine.startup import kv_setup
from sgl_fp8rl.engine.startup.kv_setup import attach
from sgl_fp8rl.ops.paged_prefill import Workspace
from sgl_fp8rl.protocol.kv_schema import WORKSPACE_BYTES
from sgl_fp8rl.receiver.kv.quantized import Heads
from sgl_fp8rl.receiver.kv.token_scales import SCALE_BYTES, TokenScales

HEADS, GROUP, DIM, SLOTS, LENGTHS, SEEN = 2, 2, 64, 64, (20, 9), (4, 0)
ERROR = 0.02
"""Of attention's output, L2, beside float64 over exact K and V. Healthy: 0.006."""
OUTLIER = 40.0


class World:
    """Two sequences, a part of each seen before: what a prefill and a decode step are given."""

    def __init__(self) -> None:
        self.layer: Any = RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, HEADS, 0)
        self.scales = TokenScales(1, Heads(HEADS, 0, HEADS), "cpu")
        attach(self.scales, nn.Module(), [self.layer])
        pool = MHATokenToKVPool(
            SLOTS, 1, torch.float8_e4m3fn, HEADS, DIM, 1, "cpu", False, enable_alt_stream=False
        )
        self.scales.allocate(pool.get_key_buffer(0).shape[0])
        self.scales.prefill_workspace = Workspace(
            HEADS, DIM, SLOTS, torch.float16, torch.device("cpu"), 1 << 20
        )
        requests = ReqToTokenPool(2, SLOTS, "cpu", False)
        backend: Any = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
        backend.token_to_kv_pool, backend.req_to_token_pool = pool, requests
        self.backend = backend
        drawn = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (
            [torch.randn(n, heads, DIM, generator=drawn).bfloat16() for n in LENGTHS]
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        for k_THD in self.k:
            k_THD[..., 3] += OUTLIER
        slots = 1 + torch.randperm(SLOTS - 1, generator=drawn)
        self.slots = slots[: sum(LENGTHS)].split(LENGTHS)
        for row, slots_T in enumerate(self.slots):
            requests.req_to_token[row, : len(slots_T)] = slots_T

    def run(self, hook: Any, first: tuple[int, ...], last: tuple[int, ...]) -> list[torch.Tensor]:
        """Tokens from ``first`` up to ``last`` of each sequence."""
        return self.attend(hook, self.batch(first, last, hook is folded_decode), first, last)

    def batch(
        self, first: tuple[int, ...], last: tuple[int, ...], is_decode: bool = False
    ) -> SimpleNamespace:
        parts = [slice(a, b) for a, b in zip(first, last, strict=True)]
        counts = [b - a for a, b in zip(first, last, strict=True)]
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            out_cache_loc=torch.cat([s[part] for s, part in zip(self.slots, parts, strict=True)]),
            req_pool_indices=torch.arange(2),
            seq_lens=torch.tensor(last),
            seq_lens_cpu=torch.tensor(last),
            extend_seq_lens_cpu=None if is_decode else counts,
        )

    def attend(
        self, hook: Any, batch: Any, first: tuple[int, ...], last: tuple[int, ...]
    ) -> list[torch.Tensor]:
        parts = [slice(a, b) for a, b in zip(first, last, strict=True)]
        counts = [b - a for a, b in zip(first, last, strict=True)]
        q, k, v = (
            torch.cat([each[part] for each, part in zip(x, parts, strict=True)]).flatten(1)
            for x in (self.q, self.k, self.v)
        )
        out = hook(never, self.backend, q, k, v, self.layer, batch)
        return list(out.unflatten(1, (HEADS * GROUP, DIM)).split(counts))

    def wanted(self, sequence: int) -> torch.Tensor:
        q, k, v = (x[sequence].double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
        scores = torch.einsum("nqd,tqd->qnt", q, k) * DIM**-0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("qnt,tqd->nqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("SGLang's own attention ran over INT8 codes")


def off(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


def test_prefill_over_a_prefix_and_decode_attend_to_what_is_stored() -> None:
    world = World()
    ends = tuple(n - 1 for n in LENGTHS)
    world.run(folded_extend, (0, 0), SEEN)
    prefilled = world.run(folded_extend, SEEN, ends)
    decoded = world.run(folded_decode, ends, LENGTHS)
    for row in range(2):
        wanted = world.wanted(row)
        assert off(prefilled[row], wanted[SEEN[row] : -1]) < ERROR
        assert off(decoded[row], wanted[-1:]) < ERROR
    assert int(world.scales.statistics[0, 0]) == sum(LENGTHS)


def test_without_the_scale_of_a_token_it_is_wrong() -> None:
    world = World()
    world.run(folded_extend, (0, 0), tuple(n - 1 for n in LENGTHS))
    world.scales.by_token[..., world.slots[0][:3]] = 0
    (decoded, _) = world.run(folded_decode, tuple(n - 1 for n in LENGTHS), LENGTHS)
    assert off(decoded, world.wanted(0)[-1:]) > ERROR


@pytest.mark.parametrize(
    ("quantization", "kv_cache", "more"),
    [("fp8rl", "int8", SCALE_BYTES * HEADS * 3), ("fp8rl", "e4m3", 0), ("fp8", "int8", 0)],
)
def test_sglang_counts_the_scales_of_a_token(
    quantization: str, kv_cache: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SimpleNamespace(kv_cache=kv_cache)
    monkeypatch.setattr(kv_setup, "current_options", lambda: options)
    monkeypatch.setattr(kv_setup.compat, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    config = SimpleNamespace(quantization=quantization, get_num_kv_heads=lambda ranks: HEADS)
    runner = SimpleNamespace(model_config=config)
    assert kv_setup.with_token_scales(lambda *_: 1000, None, runner, 3) == 1000 + more


@pytest.mark.parametrize(
    ("quantization", "dtype", "prefill", "less"),
    [
        ("fp8rl", "fp8_e4m3", "fa3", WORKSPACE_BYTES),
        ("fp8rl", "fp8_e4m3", "flashinfer", 0),
        ("fp8rl", "auto", "fa3", 0),
        ("fp8", "fp8_e4m3", "fa3", 0),
    ],
)
def test_the_cache_leaves_memory_to_prefill(
    quantization: str, dtype: str, prefill: str, less: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(kv_cache_dtype=dtype)
    monkeypatch.setattr(kv_setup.compat, "get_model_args", lambda: model)
    monkeypatch.setattr(kv_setup, "resolved", lambda settings: settings)
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization),
        server_args=SimpleNamespace(prefill_attention_backend=prefill, attention_backend=None),
    )
    assert kv_setup.less_workspace(lambda *_: 1 << 33, configurator, 1) == (1 << 33) - less


def test_a_batch_is_planned_once_where_sglang_cuts_its_slots_for_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As within prefill graphs: ``out_cache_loc`` is another tensor in each layer."""
    world = World()
    workspace = world.scales.prefill_workspace
    assert workspace is not None
    plans: list[Any] = []
    plan = workspace.plan
    monkeypatch.setattr(workspace, "plan", lambda *given: plans.append(given) or plan(*given))
    world.layer.fp8rl_layer.layer_index = 1  # not the first of the model
    world.scales.by_token = world.scales.by_token.repeat(2, 1, 1)
    batch = world.batch((0, 0), SEEN)
    for _ in "several layers":
        batch.out_cache_loc = batch.out_cache_loc[:]
        world.attend(folded_extend, batch, (0, 0), SEEN)
    assert len(plans) == 1
    world.run(folded_extend, SEEN, LENGTHS)
    assert len(plans) == 2
