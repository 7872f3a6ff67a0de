"""The split-K GEMM against the float64 oracle, and what holds from call to call."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from sgl_fp8rl.gemm import split_k
from sgl_fp8rl.gemm.split_k import Config, split_k_gemm
from tests.gemm_oracle import Case, case, cosine_distance
from tests.gpu.conftest import INTERPRETED

Tensor = torch.Tensor
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

# The interpreter sums in FP32 (measured: BF16's rounding and no more); Hopper's tensor cores keep
# 13 bits or so below the largest product of an FP8 sum.
ACCUMULATION = 2.0**-20 if INTERPRETED else 2.0**-11
COSINE = 1e-5
"""1 - cosine: measured 1.9e-6 in the interpreter, which is BF16's rounding."""
SHAPES = [(128, 128), (384, 256), (256, 640)]
TOKENS = [1, 3, 17, 65, 127, 129]
CUTS = {
    "a tile each": Config(64, 32, 1000, 4, 3),
    "whole tiles": Config(128, 16, 1, 4, 4),
    "K in two": Config(128, 64, 2, 4, 3),
    "across tiles": Config(64, 16, 5, 4, 4),
    "three or more share": Config(128, 128, 7, 8, 3),
    "prime": Config(64, 64, 13, 4, 3),
}
SPLIT = CUTS["across tiles"]


class Operands:
    """A case as tensors; scales in DeepGEMM's layout, whose padding is NaN."""

    def __init__(self, made: Case, device: str) -> None:
        self.made = made
        self.codes_MK = torch.tensor(made.codes_MK, device=device).view(FP8)
        self.weight_NK = torch.tensor(made.weight_NK, device=device).view(FP8)
        self.scales_nk = torch.tensor(made.scales_nk, device=device)
        M, k_blocks = made.scales_Mk.shape
        padded = torch.full((k_blocks, -(-M // 4) * 4), float("nan"), device=device)
        self.scales_Mk = padded.T[:M]
        self.scales_Mk.copy_(torch.from_numpy(made.scales_Mk))

    def run(self, config: Config, out: Tensor | None = None) -> Tensor:
        return split_k_gemm(
            self.codes_MK, self.scales_Mk, self.weight_NK, self.scales_nk, config, out
        )

    def check(self, out: Tensor) -> None:
        assert out.dtype == BF16 and out.shape == (len(self.codes_MK), len(self.weight_NK))
        got = out.double().cpu().numpy()
        assert self.made.excess(got, ACCUMULATION) <= 1
        assert cosine_distance(got, self.made.product) <= COSINE


def bits(out: Tensor) -> list[list[int]]:
    return out.cpu().view(torch.int16).tolist()


@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_product(device: str, M: int, N: int, K: int, outliers: bool) -> None:
    operands = Operands(case(M, N, K, outliers=outliers), device)
    for config in {*CUTS.values(), *split_k.configs(M, N, K)}:
        operands.check(operands.run(config))


def test_tiles_of_two_weight_blocks(device: str) -> None:
    operands = Operands(case(33, 512, 384, outliers=True), device)
    operands.check(operands.run(Config(256, 16, 5, 8, 3)))


def test_what_the_check_must_refuse(device: str) -> None:
    # Controls: one K block left out, the scales of two tokens or of two weight blocks exchanged.
    operands = Operands(case(17, 256, 640), device)
    whole = operands.run(SPLIT)
    for spoil in (
        lambda o: o.codes_MK.view(torch.uint8)[:, -128:].zero_(),
        lambda o: o.scales_Mk.copy_(o.scales_Mk.roll(1, 0)),
        lambda o: o.scales_nk.copy_(o.scales_nk.flip(1)),
    ):
        spoilt = Operands(operands.made, device)
        spoil(spoilt)
        with pytest.raises(AssertionError):
            operands.check(spoilt.run(SPLIT))
    operands.check(whole)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_same_bits_at_each_call_and_at_each_place_in_the_batch(device: str, cut: Config) -> None:
    made = case(33, 256, 384)
    first = Operands(made, device).run(cut)
    assert bits(Operands(made, device).run(cut)) == bits(first)
    order = np.random.default_rng(0).permutation(33)
    moved = Case(made.codes_MK[order], made.scales_Mk[order], made.weight_NK, made.scales_nk)
    assert bits(Operands(moved, device).run(cut)) == bits(first[torch.from_numpy(order)])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_out_with_gaps(device: str, cut: Config) -> None:
    operands = Operands(case(17, 256, 384), device)
    want = operands.run(cut)
    # Wider rows; tokens beside each other.
    for strides in ((256 + 24, 1), (1, 17 + 2)):
        storage = torch.full((17 * 300,), -7.0, dtype=BF16, device=device)
        out = storage.as_strided((17, 256), strides, 5)
        assert operands.run(cut, out) is out
        assert bits(out) == bits(want)
        out.fill_(-7.0)
        assert (storage == -7.0).all(), "written outside of out"


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_nan_stays_in_its_token(device: str, cut: Config) -> None:
    operands = Operands(case(19, 256, 384), device)
    want = operands.run(cut)
    operands.codes_MK.view(torch.uint8)[5, 200] = 0x7F
    operands.scales_Mk[9, 2] = float("nan")
    out = operands.run(cut)
    clean = [m for m in range(19) if m not in (5, 9)]
    assert out[5].isnan().all() and out[9].isnan().all()
    assert bits(out[clean]) == bits(want[clean])


def test_scales_of_other_strides(device: str) -> None:
    operands = Operands(case(6, 256, 512), device)
    want = bits(operands.run(SPLIT))
    laid = operands.scales_Mk.contiguous()
    wide = torch.full((6, 9), float("nan"), device=device)
    wide[:, 1:5] = laid
    column = torch.full((4, 6), float("nan"), device=device)  # strides (1, 6)
    column.T.copy_(laid)
    for scales_Mk in (laid, wide[:, 1:5], column.T):
        operands.scales_Mk = scales_Mk
        assert bits(operands.run(SPLIT)) == want
    operands.scales_nk = operands.scales_nk.T.contiguous().T
    assert bits(operands.run(SPLIT)) == want


def test_scales_in_the_layout_are_not_copied(device: str) -> None:
    for M in (1, 3, 4, 17):
        scales_Mk = Operands(case(M, 128, 256), device).scales_Mk
        assert split_k._in_layout(scales_Mk) is scales_Mk
        # The padding of the last column is not there.
        cut = scales_Mk.T.flatten()[: 2 * len(scales_Mk)].clone().view(2, M).T
        assert (split_k._in_layout(cut) is cut) == (M % 4 == 0)


def test_counters_are_reset_across_shapes_and_come_round(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_k, "_COUNTERS", 40)
    monkeypatch.setattr(split_k, "_rings", {})
    made = [Operands(case(M, N, K), device) for M, (N, K) in zip((3, 33, 1), SHAPES, strict=True)]
    for _ in range(2):
        for operands in made:
            for cut in CUTS.values():
                operands.check(operands.run(cut))
                (ring,) = split_k._rings.values()
                assert not ring.words.any()


def test_calls_take_counters_of_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_k, "_rings", {})
    where = torch.device(device)
    first, second = split_k._counters(where, 6), split_k._counters(where, 3)
    assert second.data_ptr() - first.data_ptr() == 8 * 4
    assert len(first) == 6 and len(second) == 3


def test_a_batch_of_none(device: str) -> None:
    empty = torch.empty(0, 256, dtype=FP8, device=device)
    some = Operands(case(1, 128, 256), device)
    out = split_k_gemm(
        empty, torch.empty(0, 2, device=device), some.weight_NK, some.scales_nk, SPLIT
    )
    assert out.shape == (0, 128)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("codes_MK", torch.zeros(4, 384).to(FP8), "do not share K"),
        ("codes_MK", torch.zeros(4, 256), r"codes is torch.float32"),
        ("codes_MK", torch.zeros(256, 4).to(FP8).T, "contiguous"),
        ("weight_NK", torch.zeros(96, 256).to(FP8), "not whole tiles of 64 x 128"),
        ("weight_NK", torch.zeros(128 * 256 + 1).to(FP8)[1:].view(128, 256), "16 bytes"),
        ("scales_Mk", torch.zeros(4, 3), r"pass float32 \[4, 2\]"),
        ("scales_nk", torch.zeros(1, 2).half(), r"pass float32 \[1, 2\]"),
    ],
)
def test_what_is_refused(device: str, field: str, value: Tensor, message: str) -> None:
    operands = Operands(case(4, 128, 256), device)
    moved = value if value.device.type == device else value.to(device)
    if "16 bytes" in message and device == "cuda":  # a copy would be aligned again
        moved = torch.zeros(128 * 256 + 1, device=device).to(FP8)[1:].view(128, 256)
    setattr(operands, field, moved)
    with pytest.raises(ValueError, match=message):
        operands.run(SPLIT)


def test_out_is_refused(device: str) -> None:
    operands = Operands(case(4, 128, 256), device)
    with pytest.raises(ValueError, match=r"pass bfloat16 \[4, 128\]"):
        operands.run(SPLIT, torch.empty(4, 128, device=device))


@pytest.mark.parametrize(("N", "K"), [(24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096)])
@pytest.mark.parametrize("M", [1, 16, 32, 64, 128, 200, 256])
def test_configs(M: int, N: int, K: int) -> None:
    found = split_k.configs(M, N, K)
    assert 1 <= len(found) <= 8 and len(set(found)) == len(found)
    for config in found:
        assert Config(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
        assert config.programs <= N // config.rows * -(-M // config.tokens) * (K // 128)
        assert (config.rows + config.tokens) * 128 * config.num_stages <= 226 * 1024


@pytest.mark.skipif(INTERPRETED, reason="only a GPU captures graphs")
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_in_a_graph(device: str, cut: Config, pdl: bool) -> None:
    cut = dataclasses.replace(cut, pdl=pdl)
    operands = [Operands(case(M, 384, 640, seed=M), device) for M in (1, 33, 129)]
    want = [bits(each.run(cut)) for each in operands]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [each.run(cut) for each in operands for _ in range(4)]
    for _ in range(3):
        for out in outs:
            out.zero_()
        graph.replay()
        operands[0].run(cut)  # beside the graph, with counters of its own
        assert [bits(out) for out in outs] == [bits_ for bits_ in want for _ in range(4)]


@pytest.mark.skipif(INTERPRETED, reason="only a GPU captures graphs")
def test_a_first_call_in_a_capture_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_k, "_rings", {})
    operands = Operands(case(1, 128, 256), device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="call it once before"):
        operands.run(SPLIT)
