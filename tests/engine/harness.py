"""Engines and servers under test, each in a process group of its own.

A scheduler that dies takes its parent with it, which must not be pytest; and only what a test
started is ended, by its process id.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import trainer_bridge
from sgl_fp8rl.ops.reference import quantize_weight
from sgl_fp8rl.protocol.checkpoint_headers import read_headers
from sgl_fp8rl.tools.ports import Port
from tests.engine import forked, models
from trainer_bridge.engines.engine_client import EngineError, HTTPEngine, connect
from trainer_bridge.sources.parameters import NamedTensors

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 480.0
"""A refused start in three processes took 170 s in CI."""
CALL_TIMEOUT_S = 120.0
"""Any reply, also of a machine that is busy with something else; longer is a hang."""
FLUSH_TIMEOUT_S = 30.0
"""A reply is there a moment before its request has left the scheduler."""
BUCKET_BYTES = 256 << 10
"""So small that a tiny model takes many chunks, and its larger matrices are split."""
SMALL = {"max_total_tokens": 2048, "max_running_requests": 8, "random_seed": 0}
"""Without the first, SGLang takes most of the machine's memory for its KV cache."""
IDLE = {"sleep_on_idle": True}
"""An engine without requests leaves its core to others; by default it polls without a pause."""

OF_TESTS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Variables of all engines. On a CPU the ranks share one memory, and the check finds it unbalanced
where another test frees some meanwhile."""

logs: set[Path] = set()
"""Of every engine so far; ``tests/conftest.py`` shows with a failed test those that grew in it."""

STREAMS: dict[str, Callable[[Path], NamedTensors]] = {
    "bf16": models.named_tensors,
    "fp8": lambda checkpoint: list(models.fp8_stream(checkpoint, quantize_weight)),
    "ue8m0": lambda checkpoint: list(
        models.fp8_stream(checkpoint, partial(quantize_weight, power_of_two=True))
    ),
    "stream": models.framework_stream,
}
"""What a trainer may send of the same weights: BF16, codes and scales that it made, or an iterator
that can be walked once."""


class EngineProcess:
    """An ``sgl.Engine`` and its trainer in one forked process, as an in-process RL loop has them.

    Args:
        log: file for all that the engine prints.
        tp_size: ranks, each bound to one core.
        environment: more variables, which SGLang may read as it is imported.
        options: more arguments of ``sgl.Engine``.

    Raises:
        RuntimeError: the engine did not start.
    """

    def __init__(
        self,
        log: Path,
        checkpoint: Path,
        tp_size: int = 1,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        bucket = {"FP8RL_BUCKET_BYTES": str(_bucket_bytes(checkpoint))}
        variables = os.environ | OF_TESTS | (environment or {}) | bucket
        if tp_size > 1:
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp_size)))
        options = (
            SMALL
            | IDLE
            | {
                "model_path": str(checkpoint),
                "quantization": "fp8rl",
                "skip_tokenizer_init": True,
                "tp_size": tp_size,
                "log_level": "warning",
                **options,
            }
        )
        self._port = Port()
        options["nccl_port"] = self._port.number
        self.log = log
        logs.add(log)
        self._connection, other = forked.pipe()
        anew = environment is not None
        self._process = forked.Forked(log, variables, _run_engine, other, options, anew=anew)
        other.close()
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        """``engine.fp8rl_control``. Raises EngineError."""
        return self._call("control", message)  # type: ignore[no-any-return]

    def generate(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """``engine.generate``, of one prompt or a batch. Raises EngineError."""
        return self._call("generate", payload)  # type: ignore[no-any-return]

    def sample(
        self, requests: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[dict[str, Any] | EngineError]:
        """As of an ``EngineClient``."""
        return self._call("sample", requests, timeout)  # type: ignore[no-any-return]

    def update(
        self, checkpoint: Path, version: int, stream: str = "bf16", announce: Path | None = None
    ) -> int:
        """``trainer_bridge.update``; returns how many tensors were sent. Raises EngineError."""
        return self._call("update", checkpoint, version, stream, announce)  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Empty the prefix cache; nothing may run."""
        assert self._call("flush")

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of a module there, with the ``sgl.Engine`` before the arguments."""
        self._connection.send(("call", (function, *args)))
        self._answer(START_TIMEOUT_S)

    def rpc(self, parameters: dict[str, Any]) -> None:
        """SGLang's ``collective_rpc`` of our method. Raises EngineError."""
        self._call("rpc", parameters)

    def stop(self) -> None:
        """End the engine and all of its processes."""
        end_group(self._process.pid)
        self._process.wait()
        self._connection.close()
        self._port.close()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _call(self, name: str, *args: Any) -> Any:
        self._connection.send((name, args))
        return self._answer(CALL_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise RuntimeError(f"no answer in {timeout_s:.0f} s\n{tail(self.log)}")
        try:
            result, error = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the engine's process has ended\n{tail(self.log)}") from None
        if error is not None:
            raise EngineError(*error)
        return result


def _bucket_bytes(checkpoint: Path) -> int:
    """``BUCKET_BYTES``, or what the widest block of rows needs, in FP32 and with scales."""
    specs = read_headers(sorted(checkpoint.glob("*.safetensors"))).values()
    widest = max((spec.shape[-1] for spec in specs if len(spec.shape) == 2), default=0)
    return max(BUCKET_BYTES, 2 * 512 * (models.BLOCK + 1) * -(-widest // models.BLOCK))


def _run_engine(connection: Connection, options: dict[str, Any]) -> None:
    import sglang
    from fastapi import HTTPException

    from sgl_fp8rl.engine.control.scheduler import RPC_METHOD

    engine = sglang.Engine(**options)

    def update(checkpoint: Path, version: int, stream: str, announce: Path | None) -> int:
        tensors = STREAMS[stream](checkpoint)
        return trainer_bridge.update(tensors, engine, version=version, announce=announce).tensors

    def flush() -> bool:
        coroutine = engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S)
        return bool(engine.loop.run_until_complete(coroutine).success)

    def generate(payload: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            replies = engine.generate(**payload)
        except HTTPException as error:
            raise EngineError(str(error.detail), error.status_code) from error
        except ValueError as error:
            raise EngineError(str(error), 400) from error
        return replies if isinstance(replies, list) else [replies]

    def rpc(parameters: dict[str, Any]) -> None:
        try:
            engine.collective_rpc(RPC_METHOD, **parameters)
        except AssertionError as error:
            raise EngineError(str(error)) from error

    calls = {
        "control": lambda *args: connect(engine).control(*args),  # a stock engine has none
        "rpc": rpc,
        "generate": generate,
        "sample": lambda *args: connect(engine).sample(*args),
        "update": update,
        "flush": flush,
        "call": lambda function, *args: function(engine, *args),
    }
    connection.send((None, None))
    while True:
        name, args = connection.recv()
        try:
            connection.send((calls[name](*args), None))
        except EngineError as error:
            connection.send((None, (str(error), error.status)))


class Server(HTTPEngine):
    """An SGLang server, and the client of its address.

    Args:
        log: file for all that it prints.
        command: what starts a server, without arguments; or the module that a forked process runs.
        arguments: more arguments.
        environment: more environment variables.
        key: the control route's shared secret.
        has_tokenizer: of its checkpoint; without it there are neither texts nor grammars.

    Raises:
        RuntimeError: it did not come up.
    """

    def __init__(
        self,
        log: Path,
        command: list[str] | str,
        checkpoint: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        key: str | None = None,
        has_tokenizer: bool = False,
    ) -> None:
        self._ports = Port(), Port()
        port, nccl_port = (str(port.number) for port in self._ports)
        super().__init__(f"http://127.0.0.1:{port}", key)
        small = [word for n, v in SMALL.items() for word in (f"--{n.replace('_', '-')}", str(v))]
        idle = [f"--{name.replace('_', '-')}" for name in IDLE]
        flags = [
            *("--model-path", str(checkpoint), "--quantization", "fp8rl"),
            *("--host", "127.0.0.1", "--port", port, "--nccl-port", nccl_port),
            *([] if has_tokenizer else ["--skip-tokenizer-init"]),
            *small,
            *idle,
            *arguments,
        ]
        self.log = log
        logs.add(log)
        variables = os.environ | OF_TESTS | (environment or {})
        self.process = (
            forked.Forked(log, variables, forked.run_module, command, flags)
            if isinstance(command, str)
            else spawned(log, [*command, *flags], variables)
        )
        try:
            self._await_start()
        except BaseException:
            self.stop()
            raise

    def _await_start(self) -> None:
        for _ in range(int(START_TIMEOUT_S)):
            if self.status_of("/health") == 200:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1)
                break  # it has ended
        raise RuntimeError(f"the server did not come up\n{tail(self.log)}")

    def status_of(self, path: str, body: bytes | None = None) -> int | None:
        """The HTTP status of a GET, or of a POST of ``body``; None where nothing listens."""
        return self.ask(path, body)[0]

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int | None, Any]:
        """HTTP status and reply of a GET, or of a POST of ``body``; no key is sent along."""
        request = urllib.request.Request(
            self.address + path, body, {"Content-Type": "application/json", **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
                return response.status, _json_or_text(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _json_or_text(error.read())
        except OSError:
            return None, None

    def generate(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """``/generate``, of one prompt or a batch. Raises EngineError."""
        (reply,) = self._post("/generate", [payload], CALL_TIMEOUT_S)
        if isinstance(reply, EngineError):
            raise reply
        return reply if isinstance(reply, list) else [reply]

    def stream(self, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The growing replies of a streamed ``/generate``."""
        request = urllib.request.Request(
            f"{self.address}/generate",
            json.dumps({**payload, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
            for line in response:
                event = line.removeprefix(b"data: ").strip()
                if event and event != b"[DONE]":
                    yield json.loads(event)

    def flush(self) -> None:
        """Empty the prefix cache; nothing may run."""
        assert self.status_of(f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", b"") == 200

    def stop(self) -> None:
        """End the server and all of its processes."""
        end_group(self.process.pid)
        self.process.wait()
        trainer_bridge.close(self.address)
        for port in self._ports:
            port.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


FORKED = "sglang.launch_server"
LAUNCH_SERVER = [sys.executable, "-m", FORKED]
SGLANG_SERVE = [str(Path(sys.executable).with_name("sglang")), "serve"]


def spawned(log: Path, line: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that leads a group of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def exit_status(log: Path, run: Callable[..., Any], *arguments: Any) -> int:
    """How ``run`` ends in a forked process, whose whole group is ended with it.

    Raises:
        subprocess.TimeoutExpired: it takes longer than an engine's start.
    """
    logs.add(log)
    process = forked.Forked(log, os.environ | OF_TESTS, run, *arguments)
    try:
        return process.wait(START_TIMEOUT_S)
    finally:
        end_group(process.pid)
        process.wait()


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def end_group(pid: int | None) -> None:
    """Kill the process ``pid`` that we started, and its children where it leads a group."""
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def tail(log: Path) -> str:
    """The end of a log file, for the message of a failure."""
    return log.read_text(errors="replace")[-6000:] if log.exists() else "(it printed nothing)"
