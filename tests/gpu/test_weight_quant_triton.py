"""The grouped kernel against its torch reference, byte for byte, and against the float64 oracle."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.ops import reference, weight_quant_triton
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.reference import FP8_MAX, LARGEST_SCALE
from sgl_fp8rl.ops.weight_quant_triton import Status, bases_at, compile_descriptors
from tests import oracle
from tests.gpu.conftest import INTERPRETED

Tensor = torch.Tensor
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BF16_MAX = torch.finfo(BF16).max
CANARY = 0xA5
BAD = [float("nan"), float("inf"), -float("inf")]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """On the CPU, so that a GPU and the interpreter see the same values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocks(rows: int, cols: int, *, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """Blocks that differ in magnitude, so that a scale in the wrong place shows."""
    grid = reference.num_blocks(rows), reference.num_blocks(cols)
    gain = torch.exp2(torch.arange(grid[0] * grid[1]).reshape(grid) % 13 - 6.0)
    gain = gain.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :cols]
    weight = randn(rows, cols, seed=seed, dtype=FP32) * gain
    weight[0, 0] = -0.0
    return weight.to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_bytes(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    wrong = torch.nonzero(bytes_of(got) != bytes_of(want))
    assert not len(wrong), f"{len(wrong)} bytes differ, first at {int(wrong[0])}"


class Target:
    """A box [rows, cols] inside a buffer of canaries.

    Args:
        width: elements from row to row; cols where it is 0.
        offset: elements before the box, after 64 aligned ones.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: str,
        *,
        width: int = 0,
        offset: int = 0,
    ) -> None:
        rows, cols = shape
        self.width, self.start = width or cols, 64 + offset
        size = (self.start + rows * self.width + 64) * dtype.itemsize
        self.buffer = torch.full((size,), CANARY, dtype=torch.uint8, device=device)
        self.shape, self.dtype = shape, dtype
        self.box = self._view(self.buffer)

    def _view(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.dtype).as_strided(self.shape, (self.width, 1), self.start)

    def assert_around(self) -> None:
        """Nothing but the box was written."""
        around = self.buffer.clone()
        inside = torch.zeros_like(around)
        self._view(inside).view(torch.uint8).fill_(1)
        assert bool((around[inside == 0] == CANARY).all())


class Batch:
    """Copies that run together, each with a piece of source memory of its own."""

    def __init__(self, device: str, dtype: torch.dtype = BF16) -> None:
        self.device, self.dtype = device, dtype
        self.descriptors: list[CopyDescriptor] = []
        self.sources: list[Tensor] = []
        self.targets: list[tuple[Tensor, Tensor | None]] = []  # addresses keep nothing alive

    def add(
        self,
        source: Tensor,
        target: Tensor,
        scales: Tensor | None = None,
        *,
        tag: int = 7,
        positive: bool = False,
        power_of_two: bool = False,
    ) -> None:
        """``source`` and ``target`` [rows, cols] whose columns are adjacent; on the device."""
        assert source.shape == target.shape and source.stride(1) == target.stride(1) == 1
        self.descriptors.append(
            CopyDescriptor(
                segment=len(self.sources),
                source=int(source.storage_offset()) * source.itemsize,
                target=target.data_ptr(),
                scales=0 if scales is None else scales.data_ptr(),
                rows=source.shape[0],
                cols=source.shape[1],
                source_stride=source.stride(0),
                target_stride=target.stride(0),
                scale_stride=0 if scales is None else scales.stride(0),
                source_dtype=source.dtype,
                target_dtype=target.dtype,
                positive=positive,
                tag=tag,
                power_of_two=power_of_two,
            )
        )
        self.sources.append(source)
        self.targets.append((target, scales))

    def run(self) -> int | None:
        """Run all once; the tag of what was bad. Each tile must have been counted."""
        launches = compile_descriptors(self.descriptors, self.device, self.dtype)
        addresses = [source.untyped_storage().data_ptr() for source in self.sources]
        bases, status = bases_at(addresses, torch.device(self.device)), Status(self.device)
        for launch in launches:
            launch.run(bases, status)
        tag, tiles = status.read()
        assert tiles == sum(launch.tiles for launch in launches)
        return tag


def quantized(
    weight: Tensor,
    device: str,
    *,
    model: torch.dtype = BF16,
    too_large: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes and scales that the kernel makes of ``weight`` [N, K], with canaries around both; it
    reports what is ``too_large``."""
    grid = reference.num_blocks(weight.shape[0]), reference.num_blocks(weight.shape[1])
    codes = Target((weight.shape[0], weight.shape[1]), FP8, device)
    scales = Target(grid, FP32, device, width=grid[1] + 3)
    batch = Batch(device, model)
    batch.add(weight, codes.box, scales.box, power_of_two=power_of_two)
    assert (batch.run() is not None) == too_large
    codes.assert_around()
    scales.assert_around()
    return codes.box, scales.box


def assert_quantized(
    codes: Tensor, scales: Tensor, weight: Tensor, model: torch.dtype = BF16, two: bool = False
) -> None:
    """The bytes of the reference, and of the oracle; scales are powers of ``two``."""
    rounded = weight.cpu().to(model)
    want_codes, want_scales = reference.quantize_weight(rounded, power_of_two=two)
    assert_bytes(codes, want_codes)
    assert_bytes(scales, want_scales)
    if rounded.numel() <= 2**17:  # the oracle is slow
        want = oracle.quantize_weight(rounded.float().numpy(), power_of_two=two)
        assert_bytes(codes.view(torch.uint8), torch.from_numpy(want[0]))
        assert_bytes(scales, torch.from_numpy(want[1]))


both = pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power-of-two"])


@both
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (130, 70), (130, 257)], ids=str)
@pytest.mark.parametrize(
    ("source", "model"),
    [(BF16, BF16), (FP32, BF16), (FP16, BF16), (FP16, FP16), (FP32, FP16), (FP32, FP32)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_quantized_bytes(
    device: str, shape: tuple[int, int], source: torch.dtype, model: torch.dtype, power_of_two: bool
) -> None:
    weight = blocks(*shape, dtype=source).to(device)
    found = quantized(weight, device, model=model, power_of_two=power_of_two)
    assert_quantized(*found, weight, model, power_of_two)
    with pytest.raises(AssertionError, match="bytes differ"):  # the control
        assert_quantized(*found, weight, model, not power_of_two)


def planted(value: float, *, into: float = 0.02) -> Tensor:
    """Small random values with ``value`` once in the last block."""
    weight = randn(256, 256, dtype=FP32) * into
    weight[200, 250] = value
    return weight.bfloat16()


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(128, 256, dtype=BF16), id="zero"),
        pytest.param(-torch.zeros(128, 128, dtype=BF16), id="minus-zero"),
        pytest.param(torch.cat([randn(128, 128), torch.zeros(128, 128).bfloat16()]), id="one-zero"),
        pytest.param(torch.full((128, 128), 1e-40, dtype=BF16), id="denormal"),
        pytest.param((randn(128, 128, dtype=FP32) * 1e-39).bfloat16(), id="denormal-random"),
        pytest.param((randn(128, 128, dtype=FP32) * 1e-10).bfloat16(), id="around-the-floor"),
        pytest.param(planted(1e4), id="outlier"),
        pytest.param(planted(1e30, into=1e-39), id="outlier-among-denormals"),
        pytest.param(planted(-BF16_MAX), id="bf16-max"),
        pytest.param(torch.full((128, 128), -BF16_MAX, dtype=BF16), id="all-bf16-max"),
    ],
)
@both
@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
def test_bytes_of_extreme_values(
    device: str, weight: Tensor, ragged: bool, power_of_two: bool
) -> None:
    weight = (weight[:-1, :-1] if ragged else weight).to(device)
    too_large = bool(weight.abs().max() > FP8_MAX * LARGEST_SCALE)
    found = quantized(weight, device, too_large=too_large, power_of_two=power_of_two)
    assert_quantized(*found, weight, two=power_of_two)


def test_each_tie_goes_to_the_even_code(device: str) -> None:
    # The scale is 1, so that the values are themselves what is encoded: all midpoints of codes.
    middles = torch.from_numpy((oracle.E4M3[:126] + oracle.E4M3[1:127]) / 2).float()
    row = torch.cat([middles, torch.tensor([448.0, -0.0])])
    weight = torch.stack([row, -row]).repeat(64, 1).bfloat16()
    assert torch.equal(weight.float()[0, :126], middles)
    codes, scales = quantized(weight.to(device), device)
    assert float(scales) == 1
    assert bool((codes.view(torch.uint8)[:, :127] % 2 == 0).all())
    assert_quantized(codes, scales, weight)


def test_experts_in_a_stack_and_their_gate_and_up_side_by_side(device: str) -> None:
    # As SGLang keeps them: [E, 2 * N, K] of which each HF tensor is one half of one expert.
    E, N, K = 3, 128, 256
    weights = [blocks(N, K, seed=seed).to(device) for seed in range(2 * E)]
    codes = torch.zeros(E, 2 * N, K, device=device).to(FP8)
    scales = torch.zeros(E, 2, 2, device=device)
    batch = Batch(device)
    for index, weight in enumerate(weights):
        e, half = divmod(index, 2)
        box = codes[e, half * N : (half + 1) * N]
        batch.add(weight, box, scales[e, half : half + 1], tag=index)
    assert len(compile_descriptors(batch.descriptors, device, BF16)) == 1  # no launch a tensor
    assert batch.run() is None
    want_codes, want_scales = reference.quantize_weight(torch.cat(weights).cpu().reshape(E, -1, K))
    assert_bytes(codes, want_codes)
    assert_bytes(scales, want_scales)


@pytest.mark.parametrize(
    "by_value",
    list(itertools.product([True, False], repeat=2)),
    ids=lambda each: "-".join("by-value" if one else "in-a-table" for one in each),
)
def test_bases_are_looked_up_at_each_run(device: str, by_value: tuple[bool, bool]) -> None:
    """Also of a kernel that was started before, whichever way it was."""
    first, second = blocks(128, 128, seed=1).to(device), blocks(128, 128, seed=2).to(device)
    codes, scales = Target((128, 128), FP8, device), Target((1, 1), FP32, device)
    batch = Batch(device)
    batch.add(first, codes.box, scales.box)
    (launch,) = compile_descriptors(batch.descriptors, device, BF16)
    status = Status(device)
    for weight, is_by_value in zip((first, second), by_value, strict=True):
        address = weight.data_ptr()
        launch.run(address if is_by_value else torch.tensor([address], device=device), status)
        assert_quantized(codes.box, scales.box, weight)
    assert status.read() == (None, 2)
    status.reset()
    assert status.read() == (None, 0)


def test_control_a_byte_beside_the_box_is_seen(device: str) -> None:
    target = Target((4, 4), FP8, device, width=5)
    target.box.view(torch.uint8).zero_()
    target.assert_around()
    target.buffer[64 + 4] = 0
    with pytest.raises(AssertionError):
        target.assert_around()


def copied(x: Tensor, out: Target) -> None:
    """Copy x into the box, which holds what torch makes of it then, and nothing else is written."""
    batch = Batch(str(out.buffer.device))
    batch.add(x, out.box)
    assert batch.run() is None
    out.assert_around()
    assert_bytes(out.box, x.cpu().to(out.dtype))


@pytest.mark.parametrize("target", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("source", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (130, 70)], ids=str)
def test_casts_round_as_torch_does(
    device: str, shape: tuple[int, int], source: torch.dtype, target: torch.dtype
) -> None:
    x = blocks(*shape, dtype=source).to(device)
    x[1, :8] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 6e-8, 3e-8, 65504.0, -65504.0]).to(source)
    x[1, 6:8] = x[1, 6:8].clamp(-6e4, 6e4)  # BF16 rounds 65504 to what FP16 cannot hold
    copied(x, Target(shape, target, device, width=shape[1] + 16))


@pytest.mark.parametrize("size", [1, 127, 128, 129, 128**2, 128**2 + 128 * 3 + 5])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_contiguous_copies_of_any_size(
    device: str, size: int, offset: int, dtype: torch.dtype
) -> None:
    x = randn(size + 1, dtype=FP32).to(dtype).to(device)[1 - offset :][:size].reshape(1, size)
    copied(x, Target((1, size), dtype, device, offset=offset))


@pytest.mark.parametrize("cols", [256, 250])
def test_codes_are_copied_as_bytes(device: str, cols: int) -> None:
    every = torch.arange(256).to(torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    codes = every.repeat(128 * 256 // len(every) + 1)[: 128 * 256].reshape(128, 256).to(device)
    copied(codes.view(FP8)[:, :cols], Target((128, cols), FP8, device, width=288))


def bad_tag(device: str, source: Tensor, target: torch.dtype, **kind: bool) -> int | None:
    """What is reported of a batch whose second copy, of tag 5, has this source."""
    out = torch.zeros(source.shape, device=device).to(target)
    grid = [reference.num_blocks(size) for size in source.shape]
    quantize = target == FP8 and source.dtype != FP8
    scales = torch.empty(grid, device=device) if quantize else None
    batch = Batch(device)
    good = torch.ones(4, 4, dtype=source.dtype, device=device)
    batch.add(good, torch.empty_like(good), tag=1, **kind)
    batch.add(source.to(device), out, scales, tag=5, **kind)
    return batch.run()


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("shape", [(128, 256), (130, 70)], ids=["whole", "ragged"])
@pytest.mark.parametrize(
    ("source", "target"), [(BF16, FP8), (FP32, FP8), (BF16, BF16), (FP32, BF16), (FP32, FP32)]
)
def test_nan_and_inf_are_reported(
    device: str, bad: float, shape: tuple[int, int], source: torch.dtype, target: torch.dtype
) -> None:
    x = blocks(*shape, dtype=source)
    assert bad_tag(device, x, target) is None
    x[100, 65] = bad  # odd: the upper half of a word
    assert bad_tag(device, x, target) == 5
    x[100, 65], x[100, 64] = 0, bad
    assert bad_tag(device, x, target) == 5


@given(st.integers(0, 127), st.integers(0, 255), st.sampled_from(BAD))
@settings(max_examples=10 if INTERPRETED else 50)
def test_nan_and_inf_are_reported_in_any_position(
    device: str, row: int, col: int, bad: float
) -> None:
    x = randn(128, 256)
    x[row, col] = bad
    assert bad_tag(device, x, FP8) == 5


@pytest.mark.parametrize(
    ("source", "target", "value", "is_bad"),
    [
        (FP32, BF16, 3.4e38, True),
        (FP32, BF16, BF16_MAX, False),
        (FP32, FP8, 3.4e38, True),  # the model's dtype is BF16
        (FP32, FP8, FP8_MAX * LARGEST_SCALE, False),
        (BF16, FP8, -FP8_MAX * LARGEST_SCALE * 1.01, True),
        (FP32, FP16, 65520.0, True),
        (FP32, FP16, -65519.0, False),
        (BF16, FP16, 1e5, True),
        *((torch.uint8, FP8, code, code != 0x7E) for code in (0x7E, 0x7F, 0xFF)),  # codes
    ],
)
@pytest.mark.parametrize("cols", [128, 100], ids=["whole", "ragged"])
def test_what_the_narrower_dtype_cannot_hold_is_reported(
    device: str, source: torch.dtype, target: torch.dtype, value: float, is_bad: bool, cols: int
) -> None:
    x = torch.zeros(128, cols, dtype=source)
    x[127, cols - 1] = value
    x = x.view(FP8) if source == torch.uint8 else x
    assert bad_tag(device, x, target) == (5 if is_bad else None)


@pytest.mark.parametrize("shape", [(128, 128), (6, 16), (1, 1)], ids=str)
def test_scales_must_be_positive(device: str, shape: tuple[int, int]) -> None:
    def tag_of(value: float, **kind: bool) -> int | None:
        scales = torch.exp2(torch.randint(-30, 30, shape).float())
        scales[-1, -1] = value
        return bad_tag(device, scales, FP32, **kind)

    for value in (2.0**-30, 3.0, LARGEST_SCALE):
        assert tag_of(value, positive=True) is None
    for value in (0.0, -0.0, -1.0, LARGEST_SCALE * 1.01, *BAD):
        assert tag_of(value, positive=True) == 5
    assert tag_of(-1.0) is None
    for value in (2.0**-42, 1.0, 2.0**48):
        assert tag_of(value, positive=True, power_of_two=True) is None
    for value in (3.0, 1 + 2.0**-23, 2.0**-130, 0.0, -1.0, 2.0**49, *BAD):
        assert tag_of(value, positive=True, power_of_two=True) == 5


def test_the_least_tag_is_reported_and_all_the_rest_is_written(device: str) -> None:
    weights = [blocks(128, 128, seed=seed) for seed in range(4)]
    weights[1][0, 0] = weights[3][127, 127] = float("nan")
    codes = [Target((128, 128), FP8, device) for _ in weights]
    scales = [Target((1, 1), FP32, device) for _ in weights]
    batch = Batch(device)
    for tag, weight, c, s in zip((0, 30, 10, 20), weights, codes, scales, strict=True):
        batch.add(weight.to(device), c.box, s.box, tag=tag)
    assert batch.run() == 20
    for index in (0, 2):
        assert_quantized(codes[index].box, scales[index].box, weights[index])


def test_tiles_are_counted_and_empty_moves_left_out(device: str) -> None:
    batch = Batch(device)
    for rows, cols in ((300, 257), (0, 128), (128, 0), (256, 256)):
        scales = torch.empty(3, 3, device=device)
        weight = torch.zeros(rows, cols, dtype=BF16, device=device)
        batch.add(weight, torch.zeros(rows, cols, device=device).to(FP8), scales)
    launches = compile_descriptors(batch.descriptors, device, BF16)
    assert sorted(launch.tiles for launch in launches) == [4, 9]
    assert compile_descriptors([], device, BF16) == []


DTYPES = st.sampled_from([(BF16, FP8), (BF16, BF16), (FP32, FP8), (FP32, BF16), (FP8, FP8)])
BOXES = st.tuples(
    st.one_of(st.sampled_from([128, 256]), st.integers(1, 150)),
    st.one_of(st.sampled_from([128, 256]), st.integers(1, 150)),
    st.sampled_from([0, 1, 8, 16]),  # columns to the left and to the right
    DTYPES,
)


@given(st.lists(BOXES, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=8 if INTERPRETED else 60)
def test_any_moves_together(
    device: str,
    boxes: list[tuple[int, int, int, tuple[torch.dtype, torch.dtype]]],
    seed: int,
) -> None:
    batch, outs = Batch(device), []
    for rows, cols, margin, (source, target) in boxes:
        x = blocks(rows, cols + 2 * margin, seed=seed, dtype=source).to(device)
        x = x[:, margin : margin + cols]
        out = Target((rows, cols), target, device, width=cols + margin, offset=margin)
        grid = reference.num_blocks(rows), reference.num_blocks(cols)
        scales = Target(grid, FP32, device)
        batch.add(x, out.box, scales.box if target == FP8 and source != FP8 else None)
        outs.append((x, out, scales))
    assert batch.run() is None
    for x, out, scales in outs:
        out.assert_around()
        scales.assert_around()
        if out.dtype == FP8 and x.dtype != FP8:
            assert_quantized(out.box, scales.box, x)
        else:
            assert_bytes(out.box, x.cpu().to(out.dtype))


@triton.jit
def _compare_divisions(
    amaxes: tl.tensor, xs: tl.tensor, count: tl.tensor, SPOIL: tl.constexpr
) -> None:
    """Count the codes of x / scale that `divide` and a division make differently."""
    amax = tl.load(amaxes + tl.program_id(0)).to(tl.float32)
    scale = weight_quant_triton._scale_of(amax.to(tl.int32, bitcast=True), False)
    wrong = tl.zeros((1024,), tl.int32)
    for start in range(0, 65536, 1024):
        x = tl.load(xs + start + tl.arange(0, 1024)).to(tl.float32)
        x = tl.where(tl.abs(x) <= amax, x, 0.0)  # NaN too
        fast = x * tl.div_rn(1.0, scale) if SPOIL else weight_quant_triton.divide(x, scale)
        codes = fast.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        true = tl.div_rn(x, scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        wrong += (codes != true).to(tl.int32)
    tl.atomic_add(count, tl.sum(wrong).to(tl.int64))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_division_exhaustive(device: str, dtype: torch.dtype) -> None:
    # Every amax that a block can have, and every x up to it: no scale is left out.
    xs = torch.arange(65536, device=device).to(torch.uint16).view(dtype)
    amaxes = xs[:32768][torch.isfinite(xs[:32768])].contiguous()
    assert len(amaxes) == (0x7F80 if dtype == BF16 else 0x7C00)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for spoil in (False, True):
        _compare_divisions[(len(amaxes),)](
            amaxes, xs, wrong[int(spoil) :], SPOIL=spoil, enable_fp_fusion=False
        )
    right, control = wrong.tolist()
    assert right == 0
    assert control > 0  # the product with the reciprocal alone: 45116 codes of BF16
