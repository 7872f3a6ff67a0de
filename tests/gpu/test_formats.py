"""The kernel of each weight format writes the bytes of its reference implementation."""

import pytest
import torch

from sgl_fp8rl.formats import FORMATS, UNQUANTIZED
from sgl_fp8rl.formats.copies import Placed, Scales, describe_copy
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, WeightFormat
from sgl_fp8rl.ops.regions import whole
from sgl_fp8rl.ops.weight_quant_triton import Status, compile_descriptors

BF16 = torch.bfloat16


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(256, 256), (300, 200), (3, 130, 64)])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_kernel_and_reference_agree(
    fmt: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(shape, generator=generator).to(dtype).to(device)
    codes = torch.zeros(shape, device=device).to(BF16 if fmt is UNQUANTIZED else fmt.dtypes[0])
    companions = {
        suffix: torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for suffix, spec in fmt.companions(shape).items()
    }
    scales = [Scales(placed(tensor), whole(tensor.shape)) for tensor in companions.values()]
    source, box = Placed(0, dtype, weight.stride()), whole(shape)
    descriptors = describe_copy(
        *(source, box, placed(codes), box, *scales),
        power_of_two=fmt.power_of_two_scales,
    )
    status = Status(device)
    for launch in compile_descriptors(descriptors, device, BF16):
        launch.run(weight.data_ptr(), status)
    assert status.read() == (None, status.started)
    for suffix, expected in fmt.encode(weight.cpu().to(BF16)).items():
        found = companions[suffix] if suffix else codes
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8)), suffix


def placed(tensor: torch.Tensor) -> Placed:
    return Placed(tensor.data_ptr(), tensor.dtype, tensor.stride())
