"""Host memory that a process of another host writes into by NIXL: RDMA where a network has it.

All that knows NIXL is here. Only the process that writes reads what the other one says of its
memory: a wrong metadata blob can crash NIXL's C++, so an engine never reads a trainer's.
"""

import base64
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from sgl_fp8rl.protocol.values import excerpt

TRANSPORTS = "UCX_TLS"
"""UCX's variable of the transports that it may use, or, after ^, of those that it may not."""
INSTALL = "install NIXL with pip install --no-deps nixl nixl-cu13 (nixl-cu12 for CUDA 12)"
MOST_METADATA = 1 << 20
"""Characters; NIXL's of one region has some 500."""
POLL_S = 0.0002
_STUCK: list[Any] = []
"""Transfers that did not end, and their memory, which NIXL may still read."""


class NixlError(ValueError):
    """Memory that NIXL cannot reach, or a transfer that failed."""


def check_usable() -> None:
    """Check that NIXL can be imported, and lets nobody in.

    Raises:
        NixlError: it cannot, or nobody said whether UCX may use plain TCP, over which it checks no
            key.
    """
    try:
        import nixl._api  # noqa: F401
    except ImportError as error:
        raise NixlError(f"NIXL cannot be imported ({error}); {INSTALL}") from error
    transports = os.environ.get(TRANSPORTS, "all")
    named = transports.removeprefix("^").split(",")
    if "tcp" not in named if transports.startswith("^") else "all" in named:
        raise NixlError(
            "NIXL may use plain TCP here, over which whoever reaches its port can write anywhere "
            f"in this process; set {TRANSPORTS} to the transports of your RDMA network (such as "
            "rc,ud,sm,self), or to tcp,sm,self where nobody else reaches this network"
        )


class Exposed:
    """Memory that another process may write into, as long as this object lives.

    Args:
        content: uint8 [nbytes], in host memory.

    Raises:
        NixlError: NIXL is not installed, or cannot register the memory.
    """

    def __init__(self, content: torch.Tensor) -> None:
        self._content = content
        self._agent = _agent()
        advice = "raise the limit of locked memory, or start the engine with --fp8rl-network tcp"
        with _failing(f"NIXL cannot register {content.numel()} bytes", advice):
            self._agent.register_memory([content])
            agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.told = {"agent": agent, "address": content.data_ptr()}
        """What a ``Writer`` is made of, as JSON."""


class Writer:
    """Writes into the ``Exposed`` memory of another process.

    Args:
        told: what the other process says of it.

    Raises:
        NixlError: NIXL is not installed, or the other process says something else.
    """

    def __init__(self, told: Any) -> None:
        told = told if isinstance(told, dict) else {}
        agent, self._address = told.get("agent"), told.get("address")
        sound = isinstance(agent, str) and len(agent) <= MOST_METADATA
        if not sound or type(self._address) is not int or not 0 <= self._address < 2**63:
            raise NixlError(
                f"memory is exposed as {excerpt(told)}; install the same sgl-fp8rl on both sides"
            )
        self._agent = _agent()
        with _failing(f"NIXL cannot read the engine's metadata {excerpt(agent)}"):
            self._remote = self._agent.add_remote_agent(base64.b64decode(agent, validate=True))

    def write(
        self, data: torch.Tensor, offset: int, timeout_s: float, is_over: Callable[[], bool]
    ) -> None:
        """Write, and wait until all of it has arrived.

        Args:
            data: uint8 [nbytes], contiguous, in host memory.
            offset: in bytes, from the start of what is exposed.
            is_over: whether nobody waits for it any more.

        Raises:
            NixlError: it has not arrived.
        """
        if not data.numel():
            return
        with _failing(f"{data.numel()} bytes could not be written by NIXL"):
            # UCX keeps registrations of memory that comes again
            registered = self._agent.register_memory([data])
            remote = [(self._address + offset, data.numel(), 0)]
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([data]),
                self._agent.get_xfer_descs(remote, "DRAM"),
                self._remote,
            )
            state, deadline = self._agent.transfer(handle), time.monotonic() + timeout_s
            while state == "PROC" and time.monotonic() < deadline and not is_over():
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                _STUCK.append((self, handle, data))
                raise NixlError("it did not end in time")
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(registered)
            if state != "DONE":
                raise NixlError("the transfer failed")


def writer_to(told: Any) -> Writer:
    """The writer to some memory, made once as long as somebody holds it."""
    key = repr(told)
    writer = _WRITERS.get(key)
    if writer is None:
        writer = _WRITERS[key] = Writer(told)
    return writer


_WRITERS: WeakValueDictionary[str, Writer] = WeakValueDictionary()


def _agent() -> Any:
    """One for each use: what it registered and whom it knows goes with it."""
    check_usable()
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # threads of a relay share one
    with _failing("NIXL cannot start", INSTALL):
        return nixl_agent(
            f"fp8rl-{secrets.token_hex(8)}",
            nixl_agent_config(backends=["UCX"], sync_mode=strict),
        )


@contextmanager
def _failing(what: str, advice: str = "") -> Iterator[None]:
    """Raise NIXL's errors, which have no other class in common, as a NixlError of one sentence."""
    try:
        yield
    except Exception as error:
        why = f"{what}: {str(error) or type(error).__name__}"
        raise NixlError(f"{why}; {advice}" if advice else why) from error
