"""A framework that makes ``ServerArgs`` itself, as RL frameworks do: no parser of ours runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl.tools.ports import Port
from tests.engine.conftest import Policies
from tests.engine.harness import SMALL, exit_status, tail

pytestmark = pytest.mark.engine
STARTED = "the engine has started"


def framework(checkpoint: Path, port: int, layout: dict[str, Any]) -> None:
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()  # else SGLang knows no quantization of that name
    args = ServerArgs(
        model_path=str(checkpoint),
        quantization="fp8rl",
        skip_tokenizer_init=True,
        nccl_port=port,
        port=port,  # attention of several schedulers takes others by it, whatever is there
        **SMALL,
        **layout,
    )
    sglang.Engine(server_args=args)
    print(STARTED)


@pytest.mark.guarantee("no-bypass", fault="a framework that builds ServerArgs itself")
@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"pp_size": 2}, "pp-size 2"),
        pytest.param({"dp_size": 2}, "dp-size 2", marks=pytest.mark.full),
        pytest.param(
            {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "(dp-size 2|enable-dp-attention True)",
            marks=pytest.mark.full,
        ),
    ],
    ids=["pp_size=2", "dp_size=2", "dp_attention"],
)
def test_what_updates_cannot_reach_does_not_start(
    policies: Policies, tmp_path: Path, layout: dict[str, Any], named: str
) -> None:
    log = tmp_path / "log"
    with Port() as port:
        arguments = policies("qwen3")[0], port.number, layout
        assert exit_status(log, framework, *arguments) != 0, tail(log)
    assert re.search(f"cannot update an engine with --{named}", log.read_text()), tail(log)
    assert STARTED not in log.read_text()
