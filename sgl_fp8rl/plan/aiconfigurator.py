"""Decode steps by NVIDIA's AIConfigurator 0.12.0, beside those of ``plan``: a second opinion.

It models stock SGLang's kernels (FA3, DeepGEMM), knows neither this plugin's nor XQA, and gives no
rollout: no lengths of answers, no retractions. So only a step of the rollout's mean batch is asked
for.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sgl_fp8rl.plan.prediction import Cluster, Prediction
from sgl_fp8rl.plan.shape import BF16, Shape
from sgl_fp8rl.plan.speed import Arm, speed_of
from sgl_fp8rl.plan.workload import Workload
from sgl_fp8rl.tables import align

COMMAND = "aiconfigurator"
SYSTEMS = {"h200": "h200_sxm", "h100": "h100_sxm"}
"""By ``--gpu``."""
LIMIT_S = 120.0
TOKENS = 17
"""Of a decode, whose mean step it tells."""
_STEP = re.compile(r"^\s*TPOT:\s+([\d.]+) ms$", re.MULTILINE)


class NoEstimateError(ValueError):
    """It is not installed, or has no answer."""


def check_installed() -> None:
    """Look for its command.

    Raises:
        NoEstimateError: there is none.
    """
    if shutil.which(COMMAND) is None:
        raise NoEstimateError(f"{COMMAND} is not installed; run pip install {COMMAND}==0.12.0")


def compare(
    config: Path,
    gpu: str,
    shape: Shape,
    workload: Workload,
    cluster: Cluster,
    found: Sequence[Prediction],
) -> str:
    """A line for each way to serve: the step of its mean batch, by ``plan`` and by AIConfigurator.

    Args:
        config: the model's ``config.json``.
    """
    context = workload.mean_context
    points = [(each, max(1, round(each.outcome.mean_running))) for each in found]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        shutil.copy(config, folder)  # it wants a folder, and may look around in it

        def theirs(point: tuple[Prediction, int]) -> str:
            each, batch = point
            try:
                return f"{step_ms(Path(folder), gpu, each.arm, shape, batch, context, each.tp):.1f}"
            except NoEstimateError as error:
                return str(error)

        answers = list(pool.map(theirs, points))
    speed = speed_of(cluster.gpu.scale)
    rows: list[tuple[str, ...]] = [("way", "sequences", "plan, ms", "AIConfigurator, ms")]
    for (each, batch), answer in zip(points, answers, strict=True):
        ours = speed.decode_ms(each.arm, shape, batch, float(batch * context), each.tp)
        rows.append((each.arm.name, str(batch), f"{ours:.1f}", answer))
    return (
        f"A decode step at {context} tokens a sequence, beside AIConfigurator's for stock SGLang "
        f"in the same formats:\n{align(rows, left=(0, 3))}"
    )


def step_ms(
    folder: Path, gpu: str, arm: Arm, shape: Shape, batch: int, context: int, tp: int = 1
) -> float:
    """Its mean step after ``context`` tokens.

    Args:
        folder: has the model's ``config.json``.

    Raises:
        NoEstimateError: it gives none.
    """
    options = {
        "model-path": folder,
        "system": SYSTEMS[gpu],
        "backend": "sglang",
        "estimate-mode": "static_gen",
        "batch-size": batch,
        "isl": context,
        "osl": TOKENS,
        "tp-size": tp,
        "gemm-quant-mode": "fp8_block" if arm.fp8 else "bfloat16",
        "moe-quant-mode": "fp8_block" if arm.fp8 else "bfloat16",
        "kvcache-quant-mode": "bfloat16" if arm.kv_cache == BF16 else "fp8",
        "fmha-quant-mode": "bfloat16",
        "log-level": "ERROR",
    }
    if shape.experts:
        options |= {"moe-tp-size": tp, "moe-ep-size": 1}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    try:
        done = subprocess.run(
            [COMMAND, "cli", "estimate", "--no-color", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoEstimateError(f"no estimate: {error}") from error
    step = _STEP.search(done.stdout)
    if step is None:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NoEstimateError(f"no estimate: {lines[-1].strip() if lines else 'no output'}")
    return float(step[1])
