"""SGLang on a plain CPU: what it computes without help from the machine it runs on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from sglang.srt.layers.vocab_parallel_embedding import get_masked_input_and_mask
ids = torch.tensor([0, 255, 256, 300, 511])
rows, outside = get_masked_input_and_mask(ids, 256, 512, 0, 512, 512)
print(rows.tolist(), outside.tolist())
"""


@pytest.mark.sglang
def test_compiled_functions_need_no_compiler(tmp_path: Path) -> None:
    """Of two ranks, the second looks up its half of the vocabulary."""
    environment = {
        "CXX": str(tmp_path / "no compiler"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "nothing compiled before"),
    }
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    expected = "[0, 0, 0, 44, 255] [True, True, False, False, False]"
    assert found.stdout.splitlines()[-1] == expected
