"""Linear layers and experts with a scale for each row: what SGLang's methods are given, and what is
refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from server_args import Fp8RLServerArgs
from server_args.args import FORMATS
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control import export
from sgl_fp8rl.engine.layers import linear, moe, quant_config
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, CHANNEL_FP8, CHOICES, INT8
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.test_triton_writer import BY_ROW, by_row

every_format = pytest.mark.parametrize("fmt", [CHANNEL_FP8, INT8], ids=lambda fmt: fmt.name)


def config(monkeypatch: pytest.MonkeyPatch, **options: Any) -> quant_config.FP8RLConfig:
    monkeypatch.setattr(quant_config, "current_options", lambda: Fp8RLServerArgs(**options))
    return quant_config.FP8RLConfig()


def created(method: Any, rows: list[int], cols: int) -> Any:
    """A layer on no device, as SGLang makes its weights."""
    layer: Any = nn.Module()
    layer.quant_method, layer.weight_loader = method, print
    sizes = {"input_size": cols, "output_size": sum(rows), "params_dtype": torch.bfloat16}
    with torch.device("meta"):
        method.create_weights(
            layer,
            input_size_per_partition=cols,
            output_partition_sizes=rows,
            weight_loader=print,
            **sizes,
        )
    return layer


@pytest.mark.parametrize(
    ("fmt", "capability"), [("block-fp8", (8, 0)), ("channel-fp8", (8, 6)), ("int8", (10, 0))]
)
def test_a_gpu_without_kernels_is_refused(
    fmt: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert config(monkeypatch, format=fmt).formats[0].name == CHOICES[fmt].name
    if fmt == "int8":  # an older one has its kernels
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
        config(monkeypatch, format=fmt)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match="this GPU has no kernels"):
        config(monkeypatch, format=fmt)


def test_every_choice_has_its_layers() -> None:
    assert tuple(CHOICES) == FORMATS
    names = {fmt.name for fmt in CHOICES.values()}
    assert linear.METHODS.keys() == moe.METHODS.keys() == names


@every_format
def test_sglang_computes_with_a_view_of_what_updates_write(
    fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = linear.METHODS[fmt.name](config(monkeypatch, format=fmt.name), "a")
    layer = created(method, [192, 64, 64], 208)
    assert layer.weight.shape == (320, 208) and layer.weight.dtype in fmt.dtypes
    assert layer.weight_scale.shape == (320, 1) and layer.weight_scale.dtype == torch.float32
    method.process_weights_after_loading(layer)
    seen: list[Any] = []

    def apply(_: Any, given: Any, x: Any, bias: Any) -> None:
        seen.append(given)

    monkeypatch.setattr(type(method).__bases__[1], "apply", apply)
    method.apply(layer, torch.empty(3, 208, device="meta"))
    (given,) = seen
    assert given.weight.shape == (208, 320) and given.weight.stride() == (1, 208)
    assert given.weight_scale is layer.weight_scale


@every_format
@pytest.mark.parametrize(
    ("rows", "cols", "reason"),
    [
        ([320], 200, "320 x 200 .* multiple of 16"),
        ([150, 150], 256, r"150\+150 x 256 .* multiple of 16"),
        ([64], 256, "less than 128 rows"),
    ],
)
def test_other_sizes_stay_bf16(
    fmt: WeightFormat, rows: list[int], cols: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = created(linear.METHODS[fmt.name](config(monkeypatch), "a"), rows, cols)
    assert layer.weight.dtype == torch.bfloat16 and not hasattr(layer, "weight_scale")
    assert isinstance(layer.quant_method, compat.UnquantizedLinearMethod)
    assert re.search(reason, layer.fp8rl_reason)


@pytest.mark.parametrize("sizes", [([192], 256), ([256], 192), ([128, 64], 128)], ids=str)
def test_a_ragged_layer_goes_to_channel_fp8(
    sizes: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(monkeypatch, ragged="channel")
    layer = created(linear.FP8RLLinearMethod(settings, "a"), *sizes)
    assert isinstance(layer.quant_method, linear.FP8RLChannelLinearMethod)
    assert layer.weight.shape == (sum(sizes[0]), sizes[1])
    names = {name for name, _ in layer.named_parameters()}
    assert names == {"weight", "weight_scale"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, [None, None, None]),
        ({"intermediate_size_per_partition": 192}, ["multiple of 128", None, None]),
        ({"intermediate_size_per_partition": 24}, ["of 128", "multiple of 16", "multiple of 16"]),
        ({"hidden_size": 200}, ["multiple of 128", "multiple of 16", "multiple of 16"]),
        ({"with_bias": True}, [None, "biases", "biases"]),
    ],
    ids=str,
)
def test_experts_are_refused_with_a_reason(
    changes: dict[str, Any], found: list[str | None]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size_per_partition": 128, "with_bias": False}
    runner = SimpleNamespace(is_gated=True)
    layer = SimpleNamespace(**sizes | changes, moe_runner_config=runner)
    for fmt, reason in zip(CHOICES.values(), [found[0], *found], strict=True):
        said = moe.why_not(layer, fmt, pads=False)
        assert said is None if reason is None else reason in str(said)


def test_a_block_fp8_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    settings = config(monkeypatch, format="int8")
    with pytest.raises(ValueError, match=r"int8 .* BF16 checkpoint"):
        settings.from_config(checkpoint)


def test_a_block_fp8_checkpoint_may_have_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    settings, rounded = (
        config(monkeypatch, format="block-fp8-ue8m0"),
        plain | {"scale_fmt": "ue8m0"},
    )
    assert settings.from_config(rounded).formats == [BLOCK_FP8_UE8M0]
    with pytest.raises(
        ValueError, match=r"ue8m0 .* scale_fmt None; start from the BF16 checkpoint"
    ):
        settings.from_config(plain)
    for checkpoint in (plain, rounded):  # powers of two are scales like others
        settings = config(monkeypatch, format="block-fp8")
        assert settings.from_config(checkpoint).formats == [BLOCK_FP8]


@every_format
def test_an_export_is_refused(fmt: WeightFormat) -> None:
    weights = toy.engine(by_row(0, fmt.dtypes[0]), BY_ROW)
    weights.state = State.SERVING
    assert fmt.name in str(export._why_not(weights))
