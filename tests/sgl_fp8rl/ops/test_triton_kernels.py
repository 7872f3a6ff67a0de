"""The kernel tests of ``tests/gpu`` on a CPU, through Triton's interpreter; and what needs none."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.errors import PTXASError

from sgl_fp8rl.ops import (
    activation_triton,
    channel_triton,
    delta_scatter_triton,
    delta_triton,
    expert_rows_triton,
    heads_triton,
    kv_triton,
    qk_rope_triton,
    sample_triton,
    weight_quant_triton,
)
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("file", "least", "skipped"),
    [
        ("test_weight_quant_triton.py", 100, 3),
        ("test_formats.py", 51, 36),
        ("test_kv_triton.py", 100, 8),
        ("test_qk_rope.py", 40, 8),
        ("test_heads_triton.py", 70, 4),
        ("test_activation.py", 30, 23),
        ("test_fp8_forward.py", 4, 35),
        ("test_sample_triton.py", 70, 1),
        ("test_expert_rows.py", 12, 0),
        ("test_expert_tiles.py", 13, 3),
        ("test_delta.py", 30, 10),
        ("test_delta_scatter.py", 20, 1),
    ],
)
def test_kernels_in_the_interpreter(file: str, least: int, skipped: int) -> None:
    # In a process of its own: Triton decides at import whether it interprets.
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"tests/gpu/{file}",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed(?:, (\d+) skipped)?", run.stdout)
    assert passed is not None and int(passed[1]) >= least, run.stdout[-2000:]
    assert int(passed[2] or 0) == skipped, "only graphs and what is exhaustive are left to a GPU"


@pytest.mark.parametrize(
    "module",
    [
        weight_quant_triton,
        channel_triton,
        kv_triton,
        qk_rope_triton,
        heads_triton,
        activation_triton,
        sample_triton,
        expert_rows_triton,
        delta_scatter_triton,
        delta_triton,
    ],
)
def test_kernels_call_nothing_of_triton_that_sglang_replaces(module: ModuleType) -> None:
    # SGLang sets triton.next_power_of_2 to a plain function, which no kernel may then call.
    bodies = [
        node
        for node in ast.parse(inspect.getsource(module)).body
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
