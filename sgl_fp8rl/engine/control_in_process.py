"""``Engine.fp8rl_control``: the control channel of an engine in this process."""

import asyncio
from typing import Any

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine.control import Control
from sgl_fp8rl.engine.scheduler_rpc import ControlError

IN_PROCESS_TIMEOUT_S = 600.0
"""How long a caller in this process waits for an answer that sets no limit of its own."""


def control_engine(
    engine: Any, message: dict[str, Any], timeout_s: float = IN_PROCESS_TIMEOUT_S
) -> dict[str, Any]:
    """``Engine.fp8rl_control``: the same messages for an engine in this process.

    Args:
        timeout_s: seconds to wait for the answer.

    Raises:
        ControlError: the message is refused, or not answered in time.
    """
    if engine.server_args.quantization != NAME:
        raise ControlError("this engine does not run with quantization='fp8rl'")
    answer = _bounded(_of(engine), message, timeout_s)
    return engine.loop.run_until_complete(answer)  # type: ignore[no-any-return]


def release_of_engine(original: Any, engine: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``Engine.release_memory_occupation``: it is one of ``idle()``, before the first
    message as well. SGLang loads plugins in ``Engine.__init__``, too late for a hook on that."""
    if engine.server_args.quantization == NAME:
        _of(engine)
    return original(engine, *args, **kw)


def _of(engine: Any) -> Control:
    """The channel of an engine in this process, which the first call makes."""
    if not hasattr(engine.tokenizer_manager, "fp8rl_control"):
        Control(engine.tokenizer_manager, engine.send_to_rpc, engine.server_args)
    control: Control = engine.tokenizer_manager.fp8rl_control
    return control


async def _bounded(control: Control, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        # shielded: the schedulers' reply must be read, by whichever call runs the loop next
        return await asyncio.wait_for(asyncio.shield(control.handle(message)), timeout_s)
    except asyncio.TimeoutError:
        raise ControlError(
            f"the engine's schedulers gave no answer within {timeout_s:.0f} s; see its log",
            504,
        ) from None
