"""Sums of codes and scales by HF tensor, whichever ranks hold them."""

from typing import Any

import numpy as np
import pytest

from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver import code_sums
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests import oracle
from tests.sgl_fp8rl.receiver import toy


def updated(tp: int, tensors: toy.Tensors) -> list[EngineWeights]:
    """The ranks of an engine that has committed these tensors."""
    ranks = [toy.engine(toy.toy(rank, tp), toy.SHAPES) for rank in range(tp)]
    for weights in ranks:
        toy.update(weights, tensors)
    return ranks


def read(ranks: list[EngineWeights]) -> Any:
    """The reply of the first rank."""
    said: list[Any] = []

    def collect(value: Any) -> list[Any]:
        said.append(value)
        return [value]

    for weights in ranks:
        code_sums.read(weights, collect)
    of_all = list(said)
    return code_sums.read(ranks[0], lambda value: of_all)


def expected(tensors: toy.Tensors) -> dict[str, list[int]]:
    sums = {}
    for name in toy.FP8_NAMES:
        codes, scales = oracle.quantize_weight(tensors[name].float().numpy())
        words = codes.reshape(-1).view(np.uint64), scales.reshape(-1).view(np.int32)
        sums[name] = [sum(map(int, each)) % (1 << 64) for each in words]
    return sums


@pytest.mark.parametrize("tp", [1, 2])
def test_sums_are_those_of_whole_tensors(tp: int) -> None:
    tensors = toy.checkpoint()
    ranks = updated(tp, tensors)
    assert read(ranks) == {"sums": expected(tensors)}
    # controls: another policy, and one code
    assert read(updated(tp, toy.checkpoint(1))) != {"sums": expected(tensors)}
    dict(ranks[-1].model.named_parameters())["attn.o.weight"].view(-1).view(toy.torch.uint8)[0] ^= 1
    found = read(ranks)["sums"]
    odd = [name for name, sums in expected(tensors).items() if found[name] != sums]
    assert odd == ["attn.o.weight"]


def test_an_engine_that_serves_nothing_has_none() -> None:
    (weights,) = updated(1, toy.checkpoint())
    weights.state = State.QUARANTINED
    assert "update the engine" in read([weights])["error"]
