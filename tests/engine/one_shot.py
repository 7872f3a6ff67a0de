"""One engine in a process of its own: start, ask, answer as JSON, stop.

A scheduler that fails at start takes its parent process down with it, which must not be pytest.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "one_shot answer: "


class EngineProcessError(RuntimeError):
    """The process ended without an answer; the message is all that it printed."""


def ask_engine(
    controls: list[dict[str, Any]],
    generate: dict[str, Any] | None = None,
    *,
    timeout_s: float = 240,
    **engine: Any,
) -> dict[str, Any]:
    """Start ``sgl.Engine(quantization="fp8rl", **engine)`` and stop it again.

    Args:
        controls: messages for ``engine.fp8rl_control``, sent in order.
        generate: arguments of ``engine.generate``, called after them.
        timeout_s: seconds for all of it.

    Returns:
        ``{"controls": [reply, ...], "generated": what generate returned}``.

    Raises:
        EngineProcessError: the engine did not start, failed, or took too long.
    """
    task = json.dumps({"engine": engine, "controls": controls, "generate": generate})
    command = [sys.executable, "-m", __name__, task]
    with tempfile.TemporaryFile() as output:
        # A session of its own, so that the engine's children end with it.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # no answer then, and the output says how far it came
        finally:
            _end_session(process)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    answers = [line for line in printed.splitlines() if line.startswith(MARK)]
    if len(answers) != 1:
        raise EngineProcessError(f"exit code {process.returncode} of {command}:\n{printed}")
    return dict(json.loads(answers[0].removeprefix(MARK)))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(task: dict[str, Any]) -> None:
    import sglang

    options = {
        "quantization": "fp8rl",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "random_seed": 0,
        "log_level": "warning",
    }
    engine = sglang.Engine(**options | task["engine"])
    controls = [engine.fp8rl_control(message) for message in task["controls"]]
    generated = engine.generate(**task["generate"]) if task["generate"] else None
    print(f"\n{MARK}{json.dumps({'controls': controls, 'generated': generated})}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
