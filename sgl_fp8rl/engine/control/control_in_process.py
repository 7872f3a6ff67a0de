"""``Engine.fp8rl_control`` and ``fp8rl_run``: an engine in this process, called from any thread."""

import asyncio
from collections.abc import Coroutine
from threading import Lock
from typing import Any, TypeVar

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat.settings import is_fp8rl
from sgl_fp8rl.engine.control.control import Control
from sgl_fp8rl.engine.control.engine_loop import EngineLoop
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError

T = TypeVar("T")

IN_PROCESS_TIMEOUT_S = 600.0
"""How long a caller in this process waits for an answer that sets no limit of its own."""
_making = Lock()


def control_engine(
    engine: Any, message: dict[str, Any], timeout_s: float = IN_PROCESS_TIMEOUT_S
) -> dict[str, Any]:
    """``Engine.fp8rl_control``: the same messages for an engine in this process.

    Args:
        timeout_s: seconds to wait for the answer.

    Raises:
        ControlError: the message is refused, or not answered in time; or as ``run_on_engine``.
    """
    if not is_fp8rl(engine.server_args):
        raise ControlError("this engine does not run with quantization='fp8rl'")
    return run_on_engine(engine, _bounded(_of(engine), message, timeout_s))


def run_on_engine(engine: Any, coroutine: Coroutine[Any, Any, T]) -> T:
    """``Engine.fp8rl_run``: run a coroutine on the engine's event loop, and wait for it.

    Any number of threads may call. SGLang's own calls may not run meanwhile, but do again when the
    last of these has returned.

    Raises:
        ControlError: as ``EngineLoop.run``.
    """
    return _loop_of(engine).run(coroutine)


def end_calls(original: Any, engine: Any) -> Any:
    """AROUND ``Engine.shutdown``: calls of other threads, which would wait for ever, fail."""
    if hasattr(engine, "fp8rl_loop"):
        engine.fp8rl_loop.end(ControlError("the engine was shut down; start another one"))
    return original(engine)


def release_of_engine(original: Any, engine: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``Engine.release_memory_occupation``: it is one of ``idle()``, before the first
    message as well. SGLang loads plugins in ``Engine.__init__``, too late for a hook on that."""
    if is_fp8rl(engine.server_args):
        _of(engine)
    return original(engine, *args, **kw)


def _of(engine: Any) -> Control:
    """The channel of an engine in this process, which the first call makes."""
    with _making:
        if not hasattr(engine.tokenizer_manager, "fp8rl_control"):
            compat.check_live(engine.tokenizer_manager, compat.IN_TOKENIZER_MANAGER)
            Control(engine.tokenizer_manager, engine.send_to_rpc, engine.server_args)
    control: Control = engine.tokenizer_manager.fp8rl_control
    return control


def _loop_of(engine: Any) -> EngineLoop:
    with _making:
        if not hasattr(engine, "fp8rl_loop"):
            engine.fp8rl_loop = EngineLoop(engine.loop, engine.tokenizer_manager)
    loop: EngineLoop = engine.fp8rl_loop
    return loop


async def _bounded(control: Control, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        # shielded: the schedulers' reply must be read, by whichever call runs the loop next
        return await asyncio.wait_for(asyncio.shield(control.handle(message)), timeout_s)
    except asyncio.TimeoutError:
        raise ControlError(
            f"the engine's schedulers gave no answer within {timeout_s:.0f} s; see its log",
            504,
        ) from None
