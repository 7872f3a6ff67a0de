"""What each FP8 linear is given at start, and who is left with SGLang's own kernels."""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import fp8_utils
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import attach
from sgl_fp8rl.engine.gemm import linear as gemm
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.startup import linear_kernels as startup
from sgl_fp8rl.engine.startup import warmup
from tests.sgl_fp8rl.resolving import ADA, BLACKWELL, HOPPER, Capability, Start

STOCK_SIZES = [*range(1, 16385)]


class Rank:
    """One rank of an engine with three layers.

    Its arguments are SGLang's, as it resolves and publishes them.
    """

    def __init__(
        self,
        start: Start,
        patch: pytest.MonkeyPatch,
        on: Capability = HOPPER,
        **fields: Any,
    ) -> None:
        start.on(on)
        self.server_args = start.published(start.made(**fields))
        patch.setattr(fp8_utils, "FP8_GEMM_RUNNER_BACKEND", None)
        initialize = fp8_utils.initialize_fp8_gemm_config
        takes_record = inspect.signature(initialize).parameters
        initialize(self.server_args) if takes_record else initialize()
        self.layers = [self._layer(*shape) for shape in ((512, 256), (256, 128), (512, 256))]
        self.runner = SimpleNamespace(
            server_args=self.server_args,
            gpu_id=0,
            model=nn.Module(),
            model_config=ModelConfig.from_server_args(self.server_args),
        )
        weights: Any = SimpleNamespace(options=Fp8RLServerArgs())
        attach(self.runner.model, weights)
        self.sizes: list[int] | None = None
        self.shapes: list[tuple[int, int]] = []
        patch.setattr(warmup, "warm_up", self._warm_up)
        patch.setattr(compat.deep_gemm_warmup, "_BUILTIN_M_LIST", STOCK_SIZES)
        patch.setattr(startup, "gemm_layers", lambda _model: iter(self.layers))
        patch.setattr(startup, "check_linears", self._check)
        self.checked: list[gemm.Kernel | None] = []

    def _layer(self, n: int, k: int) -> nn.Module:
        layer = nn.Linear(k, n, bias=False, device="meta")
        layer.quant_method = object.__new__(FP8RLLinearMethod)  # type: ignore[assignment]
        return layer

    def _check(self, layers: list[Any]) -> None:
        self.checked = [layer.quant_method.kernel for layer in layers]

    def _warm_up(self, shapes: list[tuple[int, int]], _runner: Any) -> list[int] | None:
        self.shapes = shapes
        return self.sizes

    def start(self) -> list[gemm.Kernel | None]:
        """The kernel of each layer."""
        calls: list[Any] = []
        startup.prepare(calls.append, self.runner)
        assert calls == [self.runner]
        methods: list[Any] = [layer.quant_method for layer in self.layers]
        return [method.kernel for method in methods]


def test_each_layer_multiplies_codes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(start, monkeypatch)
    assert rank.start() == rank.checked == [gemm.deep_gemm] * 3
    assert rank.shapes == [(256, 128), (512, 256)]
    assert rank.runner.model.fp8rl_kernels == "DeepGEMM"


@pytest.mark.parametrize("sizes", [[16, 32, 64], None])
def test_sglangs_pass_runs_our_sizes_where_there_are_any(
    start: Start, monkeypatch: pytest.MonkeyPatch, sizes: list[int] | None
) -> None:
    rank = Rank(start, monkeypatch)
    rank.sizes = sizes
    rank.start()
    assert (sizes or STOCK_SIZES) == compat.deep_gemm_warmup._BUILTIN_M_LIST


@pytest.mark.parametrize(
    ("on", "fields", "word"),
    [
        (HOPPER, {"fp8_gemm_runner_backend": "flashinfer_deepgemm"}, "--fp8-gemm-backend flash"),
        (BLACKWELL, {}, "Hopper"),
        (ADA, {}, "Hopper"),
        (HOPPER, {"dtype": "float16"}, "float16"),
        (HOPPER, {"enable_deterministic_inference": True}, "deterministic"),
        (HOPPER, {"rl_on_policy_target": "fsdp"}, "deterministic"),
    ],
)
def test_sglangs_own_kernels_stay(
    on: Capability, fields: Any, word: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(start, monkeypatch, on=on, **fields)
    assert rank.start() == [None] * 3
    assert word in rank.runner.model.fp8rl_kernels


def test_a_model_without_fp8_is_not_spoken_of(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(start, monkeypatch)
    rank.layers.clear()
    assert rank.start() == []
    assert not hasattr(rank.runner.model, "fp8rl_kernels")


def linear(method_class: type, product: Any, n: int, k: int) -> nn.Module:
    module = nn.Linear(k, n, bias=False, device="meta")
    method: Any = object.__new__(method_class)
    method.w8a8_block_fp8_linear = product
    module.quant_method = method
    return module


def test_layers_are_those_that_go_to_deep_gemm() -> None:
    ours, deep_gemm = FP8RLLinearMethod, compat.deep_gemm_linear
    model = nn.ModuleList(
        [
            linear(ours, deep_gemm, 256, 128),
            linear(ours, deep_gemm, 256, 128),
            linear(ours, functools.partial(deep_gemm), 128, 256),
            linear(ours, lambda: None, 384, 128),  # another backend
            linear(ours, deep_gemm, 96, 128),  # N is not a multiple of 64
            linear(ours, deep_gemm, 256, 192),  # K is not a multiple of 128
            linear(compat.Fp8LinearMethod, deep_gemm, 512, 128),  # --quantization fp8
            nn.Linear(128, 640, device="meta"),
        ]
    )
    shapes = [tuple(layer.weight.shape) for layer in startup.gemm_layers(model)]
    assert shapes == [(256, 128), (256, 128), (128, 256)]
