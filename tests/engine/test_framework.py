"""A framework that makes ``ServerArgs`` itself, as RL frameworks do: no parser of ours runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_fp8rl.ports import Port
from tests.engine.conftest import Policies
from tests.engine.harness import ROOT, SMALL, START_TIMEOUT_S, end_group, tail

pytestmark = pytest.mark.engine

FRAMEWORK = """
import sys

import sglang
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    load_plugins()  # else SGLang knows no quantization of that name
    args = ServerArgs(
        model_path=sys.argv[1],
        quantization="fp8rl",
        {layout},
        skip_tokenizer_init=True,
        nccl_port=int(sys.argv[2]),
        **{small},
    )
    sglang.Engine(server_args=args)
    print("the engine has started")
"""


@pytest.mark.guarantee("no-bypass", fault="a framework that builds ServerArgs itself")
@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("pp_size=2", "pp-size 2"),
        pytest.param("dp_size=2", "dp-size 2", marks=pytest.mark.full),
        pytest.param(
            "tp_size=2, dp_size=2, enable_dp_attention=True",
            "(dp-size 2|enable-dp-attention True)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_updates_cannot_reach_does_not_start(
    policies: Policies, tmp_path: Path, layout: str, named: str
) -> None:
    script, log = tmp_path / "framework.py", tmp_path / "log"
    script.write_text(FRAMEWORK.replace("{small}", repr(SMALL)).replace("{layout}", layout))
    port = Port()
    line = [sys.executable, str(script), str(policies("qwen3")[0]), str(port.number)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        assert process.wait(START_TIMEOUT_S) != 0
    finally:
        end_group(process.pid)
        process.wait()
        port.close()
    assert re.search(f"cannot update an engine with --{named}", log.read_text()), tail(log)
    assert "the engine has started" not in log.read_text()
