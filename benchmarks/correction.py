"""Correction and metrics of 1M tokens, on one core and on a GPU.

All metrics are computed and read, by position too, and by four policy versions where the case says
so. Launches are on a core what torch dispatches of one block of rows, views aside, on a GPU the
kernels and copies that run there, with their time.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from trainer_bridge.correction import PRESETS, CorrectionConfig, correct_logprobs
from trainer_bridge.metrics import mismatch

TOKENS = 1 << 20
LENGTHS = (4096, 32768)
MISMATCH = 0.02  # nats, as FP8 rollouts have it
VERSIONS = 4
CONFIGS = {
    "token TIS": PRESETS["decoupled_token_is"],
    "geometric rejection, sequence TIS": PRESETS["decoupled_geo_rs_seq_tis"],
    "three rejections, veto, normalised TIS": CorrectionConfig(
        rollout_is_batch_normalize=True,
        rollout_rs={"token_k1": 2.0, "seq_mean_k3": 0.01, "seq_max_k2": 1.0},
        veto_threshold=1e-4,
    ),
}


@dataclass(frozen=True)
class Arm:
    """Where it runs."""

    name: str
    device: str


CORE, GPU_ARM = Arm("one core", "cpu"), Arm("one GPU", "cuda")


class Dispatched(TorchDispatchMode):
    """Counts what torch dispatches, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        is_empty = "empty" in func._schema.name
        self.count += not (is_view or is_empty)
        return func(*args, **(kwargs or {}))


def launches(function: Callable[[], Any], device: str) -> dict[str, list[float]]:
    """Of one call: what the GPU runs, kernels and copies, or what torch dispatches on a CPU."""
    if device == "cpu":
        with Dispatched() as dispatched:
            function()
        return {"correction_launches": [dispatched.count]}
    function()  # nothing is compiled or kept while it is counted
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        function()
    run = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    took_us = sum(event.self_device_time_total for event in run)
    return {"correction_launches": [len(run)], "correction_kernels_ms": [took_us / 1e3]}


def batch(length: int, device: str) -> list[torch.Tensor]:
    """Trainer and rollout logprobs, mask and versions: TOKENS tokens, full sequences."""
    generator = torch.Generator().manual_seed(0)
    shape = TOKENS // length, length
    rollout_BT = -1 - torch.rand(shape, generator=generator)
    trainer_BT = rollout_BT + MISMATCH * torch.randn(shape, generator=generator)
    mask_BT = torch.ones(shape, dtype=torch.bool)
    versions_BT = (torch.arange(shape[0]) % VERSIONS)[:, None].expand(shape).contiguous()
    return [tensor.to(device) for tensor in (trainer_BT, rollout_BT, mask_BT, versions_BT)]


def timed(function: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Wall time until the metrics are there; reading them waits for the GPU."""
    for _ in range(3):
        function()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        found.append((time.perf_counter() - started) * 1e3)
    return {"correction_ms": found}


def measure(arm: Arm, run: Run) -> list[Measurement]:
    """Time of each case, and launches of those without versions."""
    torch.set_num_threads(1)
    device = arm.device
    measurements: list[Measurement] = []
    counted: list[tuple[Measurement, Callable[[], Any]]] = []
    for length, (name, config) in itertools.product(LENGTHS, CONFIGS.items()):
        trainer_BT, rollout_BT, mask_BT, versions_BT = batch(length, device)
        few = slice(max(1, mismatch.CPU_TOKENS // length) if device == "cpu" else None)
        alone = partial(correct_logprobs, trainer_BT, rollout_BT, mask_BT, config)
        cases: dict[str, Callable[[], Any]] = {name: alone}
        if config == PRESETS["decoupled_token_is"]:
            cases[f"{name}, {VERSIONS} versions"] = partial(alone, versions_BT=versions_BT)
        for case, function in cases.items():
            measurement: Measurement = {
                "arm": arm.name,
                "model": f"{TOKENS >> 20}M tokens",
                "case": f"{TOKENS // length}x{length}, {case}",
                "values": timed(function, run.options["repeats"]),
            }
            measurements.append(measurement)
            if function is alone:
                first = trainer_BT[few], rollout_BT[few], mask_BT[few]
                counted.append((measurement, partial(correct_logprobs, *first, config)))
    # a profiler, once it was there, slows down every launch of its process
    for measurement, function in counted:
        measurement["values"] |= launches(function, device)
    return measurements


OPTIONS = (Option("repeats", "of each case", default=30),)
CPU = Benchmark((Job("core", CORE),), measure, limit_s=600.0, options=OPTIONS, gpu="unused")
GPU = Benchmark((Job("core", CORE), Job("gpu", GPU_ARM)), measure, limit_s=600.0, options=OPTIONS)
