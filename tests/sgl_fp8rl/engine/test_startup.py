"""What each FP8 linear is given at start, and who is left with SGLang's own kernels."""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import fp8_utils
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import attach
from sgl_fp8rl.engine.gemm import candidates
from sgl_fp8rl.engine.gemm.candidates import STOCK, Candidate
from sgl_fp8rl.engine.gemm.dispatch import Choices
from sgl_fp8rl.engine.gemm.table import Entry, Table
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.startup import linear_kernels as startup
from sgl_fp8rl.engine.tuning import quick_tune, warmup
from sgl_fp8rl.ops.reference import quantize_weight
from tests.sgl_fp8rl.gemm import fakes
from tests.sgl_fp8rl.resolving import ADA, BLACKWELL, HOPPER, Capability, Start

MACHINE = Machine("NVIDIA H200", 132, {"torch": "2.11.0"})
BIG, SMALL = (512, 256), (256, 128)
STOCK_SIZES = [*range(1, 16385)]
SPLIT = [Entry(64, "deep_gemm_split_n", {"splits": 2}, 8.0, 12.0)]


class Rank:
    """One rank of an engine, with two layers of one shape and one of another.

    Its arguments are SGLang's, as it resolves and publishes them.
    """

    def __init__(
        self,
        start: Start,
        patch: pytest.MonkeyPatch,
        rank: int = 0,
        world_size: int = 1,
        on: Capability = HOPPER,
        **fields: Any,
    ) -> None:
        start.on(on)
        self.server_args = start.published(start.made(**fields))
        patch.setattr(fp8_utils, "FP8_GEMM_RUNNER_BACKEND", None)
        initialize = fp8_utils.initialize_fp8_gemm_config
        takes_record = inspect.signature(initialize).parameters
        initialize(self.server_args) if takes_record else initialize()
        self.found: list[Any] = []
        self.broadcast: list[Any] = []
        size = {"world_size": world_size, "ranks": [0, 1]}
        self.group = SimpleNamespace(rank_in_group=rank, cpu_group="gloo", **size)
        self.layers = [self._layer(*shape) for shape in (BIG, SMALL, BIG)]
        self.runner = SimpleNamespace(
            server_args=self.server_args,
            gpu_id=0,
            model=nn.Module(),
            model_config=ModelConfig.from_server_args(self.server_args),
        )
        weights: Any = SimpleNamespace(options=Fp8RLServerArgs(tune_cache="the user's folder"))
        attach(self.runner.model, weights)
        self.sizes: list[int] | None = None
        patch.setattr(warmup, "warm_up", lambda _shapes, _runner: self.sizes)
        for name, value in {"_BUILTIN_M_LIST": STOCK_SIZES, "_DO_COMPILE_ALL": True}.items():
            patch.setattr(compat.deep_gemm_warmup, name, value)
        patch.setattr(startup, "gemm_layers", lambda _model: iter(self.layers))
        patch.setattr(compat, "get_tp_group", lambda: self.group, raising=False)
        patch.setattr(torch.distributed, "broadcast_object_list", self._broadcast)
        patch.setattr(quick_tune, "find", self._find)
        self.compiled: list[Any] = []
        patch.setattr(startup, "compile_choices", self.compiled.append)

    def _layer(self, n: int, k: int) -> nn.Module:
        layer = nn.Linear(k, n, bias=False, device="meta")
        layer.quant_method = object.__new__(FP8RLLinearMethod)  # type: ignore[assignment]
        return layer

    def _find(self, shapes: Any, machine: Machine, folder: str, may_measure: bool) -> Table:
        assert not compat.deep_gemm_warmup._DO_COMPILE_ALL
        self.found.append((shapes, machine.gpu, machine.sms, folder, may_measure))
        return {BIG: SPLIT}

    def _broadcast(self, objects: list[Any], src: int, group: str) -> None:
        assert (src, group) == (0, "gloo")
        self.broadcast.append(list(objects))
        if self.group.rank_in_group:
            objects[:] = [{BIG: SPLIT}]

    def start(self) -> list[tuple[int, ...] | None]:
        """The bounds of each layer's choices."""
        calls: list[Any] = []
        startup.prepare(calls.append, self.runner)
        assert calls == [self.runner]
        methods: list[Any] = [layer.quant_method for layer in self.layers]
        return [m.choices and m.choices.bounds for m in methods]


@pytest.mark.parametrize(("number", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_each_layer_gets_the_choices_of_its_shape(
    number: int, world_size: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the table that the first rank found; and SGLang's pass runs our sizes."""
    rank = Rank(start, monkeypatch, number, world_size)
    rank.sizes = [16, 32, 64]
    assert rank.start() == [(64,), (), (64,)]
    found = ([SMALL, BIG], "NVIDIA H200", 132, "the user's folder", True)
    assert rank.found == [found] * (number == 0)
    assert rank.broadcast == [[None if number else {BIG: SPLIT}]] * (world_size > 1)
    assert rank.compiled == [rank.layers[2], rank.layers[1]]  # one of each shape
    assert rank.sizes == compat.deep_gemm_warmup._BUILTIN_M_LIST


def test_sglangs_pass_runs_its_own_sizes_where_there_are_none_of_ours(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rank(start, monkeypatch).start()
    assert compat.deep_gemm_warmup._BUILTIN_M_LIST == STOCK_SIZES


def test_kernels_run_once_before_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each every 64 rows; the stock choice is left to SGLang's own warm-up."""
    ran: list[Any] = []

    def bind(name: str) -> Any:
        def kernel(codes: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            ran.append((name, codes.shape[0]))
            return fakes.exact(codes, *rest)

        return lambda _config: kernel

    for name in (STOCK, "triton", "deep_gemm_split_n"):
        fake = Candidate(name, lambda *_: None, bind(name))
        monkeypatch.setitem(candidates.CANDIDATES, name, fake)
    bounds = {8: "triton", 64: STOCK, 192: "deep_gemm_split_n", 300: "triton"}
    choices = Choices.of([Entry(m, name, {}, 1.0, 2.0) for m, name in bounds.items()])
    weight, scales = quantize_weight(torch.ones(*BIG))
    method = SimpleNamespace(choices=choices)
    layer = SimpleNamespace(weight=weight, weight_scale_inv=scales, quant_method=method)
    startup.compile_choices(layer)
    parts = [("deep_gemm_split_n", m) for m in (128, 192)]
    assert ran == [("triton", 8), *parts, ("triton", 256), ("triton", 300)]


def test_batches_that_are_faster_padded_have_no_graph(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(start, monkeypatch, cuda_graph_max_bs_decode=512)
    slow_at_256 = [Entry(m, STOCK, {}, us, us) for m, us in ((256, 9.0), (512, 8.0))]
    table = dict.fromkeys((BIG, SMALL), slow_at_256)
    monkeypatch.setattr(quick_tune, "find", lambda *_, **__: table)
    graphs = compat.get_exec().graph.cuda_graph_config.decode
    kept = [size for size in graphs.bs if size <= 128 or size > 256]
    rank.start()
    assert compat.get_exec().graph.cuda_graph_config.decode.bs == kept


def test_engines_without_cuda_graphs_do_not_measure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {f"cuda_graph_backend_{phase}": "disabled" for phase in ("decode", "prefill")}
    rank = Rank(start, monkeypatch, **off)
    rank.start()
    assert rank.found[0][-1] is False


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
    assert rank.found == []
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
