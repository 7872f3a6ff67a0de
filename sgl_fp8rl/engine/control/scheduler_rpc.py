"""Asks the schedulers over SGLang's own rpc socket; ``/health`` sees whether they answer."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import zmq

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.scheduler import RPC_METHOD
from sgl_fp8rl.receiver.rank_server import last_activity

POLL_S = 0.0005
"""Between two looks for a reply, or two attempts to begin where requests are aborted."""
SPIN_S = 0.005
"""How long a reply is awaited without sleeping: most take less than a sleep would add."""
ANSWER_TIMEOUT_S = 60.0
"""How long the schedulers may take to answer before ``/health`` reports that they hang."""
BUSY_STATUS = 409
"""HTTP status of what is refused because requests run."""


class ControlError(RuntimeError):
    """A refused control message; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class SchedulerRpc:
    """Asks the schedulers of one engine, one message at a time."""

    def __init__(self, rpc: zmq.Socket[bytes], tokenizer_manager: Any) -> None:
        self._rpc, self._manager = rpc, tokenizer_manager

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and await the reply.

        Raises:
            ControlError: the schedulers refuse it.
        """
        try:
            parameters = {"message": json.dumps(message)}
        except RecursionError:
            raise ControlError("the message is nested too deeply; send a control message") from None
        compat.sock_send(self._rpc, compat.RpcReqInput(method=RPC_METHOD, parameters=parameters))
        reply = await self.receive(ANSWER_TIMEOUT_S)
        if "error" in reply:
            raise ControlError(reply["error"], BUSY_STATUS if reply.get("busy") else 400)
        return reply

    async def receive(self, healthy_s: float, sockets: Sequence[str] = ()) -> dict[str, Any]:
        """Await the schedulers' reply. ``/health`` may fail after ``healthy_s`` without one, and
        without a message of the trainer on one of these sockets.
        """
        loop = asyncio.get_running_loop()
        soon, late = loop.time() + SPIN_S, time.time() + healthy_s
        while not self._rpc.poll(0):
            now = time.time()
            if now >= late:
                late = max([late, *(last_activity(path) + healthy_s for path in sockets)])
            if now < late:
                # /health looks at it: schedulers that serve an update answer nothing else meanwhile
                self._manager.last_receive_tstamp = now
            await asyncio.sleep(0 if loop.time() < soon else POLL_S)
        reply = json.loads(compat.sock_recv(self._rpc).message)
        assert isinstance(reply, dict)
        return reply
