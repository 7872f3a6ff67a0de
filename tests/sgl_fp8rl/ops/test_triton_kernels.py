"""The kernel tests of ``tests/gpu`` on a CPU, through Triton's interpreter; and what needs none."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import PTXASError

from sgl_fp8rl.ops import weight_quant_triton
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from tests import run

ROOT = Path(__file__).parents[3]
KERNELS = sorted((ROOT / "sgl_fp8rl" / "ops").glob("*_triton.py"))
INTERPRETED = {
    "test_weight_quant_triton": (100, 2),
    "test_formats": (27, 0),
    "test_kv_triton": (90, 2),
    "test_kv_int8_triton": (100, 3),
    "test_kv_pages_triton": (18, 1),
    "test_qk_rope": (60, 6),
    "test_activation": (30, 20),
    "test_fp8_forward": (8, 65),
    "test_sample_triton": (70, 1),
    "test_expert_rows": (12, 0),
    "test_delta": (25, 10),
    "test_delta_scatter": (20, 1),
}
"""How many tests of each file of ``tests/gpu`` pass at least, and how many are skipped."""
INTERPRETED_S = 1200
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The results of all files, and what pytest printed."""
    xml = tmp_path_factory.mktemp("interpreted") / "results.xml"
    files = [f"tests/gpu/{name}.py" for name in INTERPRETED]
    # In a process of its own: Triton decides at import whether it interprets.
    ended = subprocess.run(
        [*PYTEST, f"--junitxml={xml}", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=INTERPRETED_S,
    )
    printed = ended.stdout[-8000:] + ended.stderr[-2000:]
    assert xml.exists(), printed
    _, failed, _, _ = run.read(xml)
    assert ended.returncode == (1 if failed else 0), printed
    return xml, printed


@pytest.mark.timeout(INTERPRETED_S + 60)
@pytest.mark.parametrize("file", INTERPRETED)
def test_kernels_in_the_interpreter(file: str, interpreted: tuple[Path, str]) -> None:
    xml, printed = interpreted
    least, left_out = INTERPRETED[file]
    passed, failed, skipped, _ = run.read(xml, f"tests.gpu.{file}")
    assert failed == 0 and passed >= least, printed
    assert skipped == left_out, "only graphs and what is exhaustive are left to a GPU"


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_kernels_call_nothing_of_triton_that_sglang_replaces(file: Path) -> None:
    # SGLang sets triton.next_power_of_2 to a plain function, which no kernel may then call.
    bodies = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert bodies
    called = {
        node.attr
        for body in bodies
        for statement in body.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "triton"
    }
    assert not called


class Fails:
    """A kernel that cannot be started."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PTXASError("no ptxas"), "PTXASError.*no ptxas"),
        (
            subprocess.CalledProcessError(1, ["cc"]),
            "CalledProcessError.*cc",
        ),
        (RuntimeError("out of memory"), "^out of memory$"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_is_a_sentence(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a rank answers with, where any other exception would end its engine."""
    monkeypatch.setattr(weight_quant_triton, "_copy_tiles", Fails(error))
    memory = torch.zeros(64)
    descriptor = CopyDescriptor(
        0, 0, memory.data_ptr(), 0, 1, 8, 8, 8, 0, torch.float32, torch.float32, False, 0
    )
    (launch,) = weight_quant_triton.compile_descriptors([descriptor], "cpu", torch.bfloat16)
    with pytest.raises(RuntimeError, match=sentence):
        launch.run(memory.data_ptr(), weight_quant_triton.Status(torch.device("cpu")))
