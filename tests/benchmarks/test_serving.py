"""Engines that are timed: floors, random weights and their way into stock engines."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import measuring, rollout
from benchmarks.engines import models, serving, stock_push, traffic, weights
from sgl_fp8rl.ops.reference import FP8_DTYPE
from tests.benchmarks.test_weights import TINY_DENSE

QWEN3_8B, MOE = models.MODELS["qwen3-8b"], models.MODELS["qwen3-30b-a3b"]
WHOLE, FP8 = 16_381_470_720, 6_945_767_424
"""Bytes of Qwen3-8B in BF16, and of its linears in FP8."""


@pytest.mark.parametrize(
    ("arm", "load", "floor_ms", "weights", "token"),
    [
        # shared figures of one H200: FP8 linears and FP8 KV, a head in BF16
        ("fp8rl-kv8", serving.Load(128, 512, 352), 3.45, WHOLE - FP8 + 4 * FP8 // 128**2, 1),
        ("fp8rl-kv8", serving.Load(64, 8192, 224), 11.0, WHOLE - FP8 + 4 * FP8 // 128**2, 1),
        ("stock-bf16", serving.Load(64, 8192, 224), 22.0, WHOLE, 2),
    ],
)
def test_floor_and_capacity_by_hand(
    arm: str, load: serving.Load, floor_ms: float, weights: int, token: int
) -> None:
    keywords = rollout.find(arm).keywords(largest=128)
    floor = serving.decode_floor_ms(keywords, QWEN3_8B, load, 4.3)
    assert floor == pytest.approx(floor_ms, rel=0.02)
    wanted = (0.88 * (139 << 30) - weights) / (36 * 2 * 8 * 128 * token)
    assert serving.capacity(keywords, QWEN3_8B, 139 << 30) == pytest.approx(wanted)


def test_two_ranks_share_weights_and_kv() -> None:
    load, shape = serving.Load(64, 4096, 128), models.SHAPES["qwen3-32b"]
    (arm,) = (job.spec for job in rollout.ON_TWO_GPUS.jobs if job.spec.name == "fp8rl-kv8")
    both = arm.keywords(batches=(64,))
    one = {**both, "tp_size": 1}
    floors = [serving.decode_floor_ms(keywords, shape, load, 4.3) for keywords in (one, both)]
    assert floors[0] == pytest.approx(2 * floors[1])
    tokens = [serving.capacity(keywords, shape, 140 << 30) for keywords in (one, both)]
    assert tokens[1] > 2 * tokens[0] > 0, "the second GPU's memory holds no weights again"


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    assert QWEN3_8B.experts_read(1) == 1.0
    assert MOE.experts_read(1) == pytest.approx(8 / 128)
    assert 0.98 < MOE.experts_read(64) < 1.0
    parameters = list(models.parameters(MOE))
    whole, one = (traffic.step_weight_bytes(parameters, "bf16", n) for n in (1.0, 8 / 128))
    assert whole == traffic.payload_bytes(parameters, "bf16") - 2 * 151_936 * 2048
    assert one == whole - (1 - 8 / 128) * 2 * 48 * 128 * 3 * 768 * 2048


class Stock:
    """Stands for a stock engine that starts on zeros; ``deaf`` is what it does not take."""

    def __init__(self, deaf: Callable[[str], bool] = lambda name: False) -> None:
        self.deaf, self.sums, self.flushes = deaf, 0.0, 0

    def load(self, named: weights.Named, last: bool, update: str, ranks: int) -> None:
        assert not last and ranks == 1
        self.sums += sum(float(t.float().sum()) for name, t in named if not self.deaf(name))

    def flush_cache(self) -> Any:
        """Refused the first time, as by a scheduler that has not put away its last batch."""
        self.flushes += 1
        return SimpleNamespace(success=self.flushes % 2 == 0)

    def generate(self, input_ids: Any, **_: Any) -> Any:
        values = [(None, 0, None)] + [(self.sums - n, n, None) for n in input_ids[0][1:]]
        return [{"meta_info": {"input_token_logprobs": values}}]


def test_a_push_that_does_not_arrive_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_push, "send", lambda engine, *given: engine.load(*given))
    named = weights.shared(TINY_DENSE, "cpu", "fp8")
    healthy = Stock()
    stock_push.push(healthy, named)
    assert healthy.flushes == 2 * 3
    deaf: dict[str, Callable[[str], bool]] = {
        "the MLP": lambda name: name.endswith("_proj.weight") and ".mlp." in name,
        "attention": lambda name: name.endswith("_proj.weight"),
        "all but the linears": lambda name: True,
    }
    for part, to in deaf.items():
        with pytest.raises(RuntimeError, match=f"random weights in {part} changed no logprob"):
            stock_push.push(Stock(to), named)
    with pytest.raises(RuntimeError, match="not finite"):
        stock_push.push(Stock(), [("lm_head.weight", torch.full((1,), torch.nan))])
    monkeypatch.setattr(stock_push, "IDLE_S", 0.0)
    busy = SimpleNamespace(flush_cache=lambda: SimpleNamespace(success=False))
    with pytest.raises(RuntimeError, match="the engine is not idle"):
        stock_push.flush(busy)
    assert sum(map(len, stock_push.weight_groups(named).values())) == len(named)


@pytest.mark.filterwarnings("ignore")
def test_sglang_s_own_dummy_codes_are_nearly_all_zero() -> None:
    """Why the push is there: if this fails, SGLang draws codes of its own now."""
    pytest.importorskip("sglang")
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.empty(256, 256).to(FP8_DTYPE), requires_grad=False)
    initialize_dummy_weights(module)
    zeros = (module.weight.float() == 0).float().mean()
    assert zeros > 0.95  # 0.976: what is beyond half of 2**-9, of +-1e-3
    one = replace(TINY_DENSE, layers=1)
    pushed = dict(weights.shared(one, "cpu", "fp8"))["model.layers.0.mlp.up_proj.weight"]
    assert (pushed.float() == 0).float().mean() < 0.01  # 0.000


def test_a_gpu_that_another_process_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine would be given the memory a moment later, and its floor would be wrong."""
    total = 140 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total - (1 << 30), total))
    assert measuring.idle_bytes() == total - (1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (total - (60 << 30), total))
    with pytest.raises(RuntimeError, match=r"64\.4 GB of the GPU are in use"):
        measuring.idle_bytes()
