"""What goes wrong: each fault, and what must be true of the engine right after it."""

import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.gpu.policies import Tensors
from tests.soak import bridge, trainer
from tests.soak.judge import ViolationError
from tests.soak.settings import draw
from tests.soak.soak import IN_FLIGHT, Soak
from tests.soak.wire import Act, Wire
from trainer_bridge import EngineError

Fault = Callable[[Soak, random.Random], None]
TAGS = "kv_cache", "weights", "cuda_graph"
PAUSED_S = 0.2
HELLO_BYTES = 49
"""The first message, which the engine awaits for longer than others."""
ROOM_BYTES = 8
"""An address in a later message may have some digits less."""


def killed(soak: Soak, choose: random.Random) -> None:
    """The trainer dies at a random byte of what it sends."""
    before = bridge.status(soak.server)
    byte = choose.randrange(soak.bytes_of_first_update - ROOM_BYTES)
    how = choose.choice(IN_FLIGHT)
    version, policy = soak.next_version(), soak.other_policy()
    chunks = trainer.killed_at(byte, soak.setting.device, soak.server.address, policy, version, how)
    _check_ended(soak, before, chunks, "the trainer is gone", f"killed at byte {byte}")


def cut(soak: Soak, choose: random.Random) -> None:
    """The connection ends at a random byte."""

    def shut(wire: Wire, peer: socket.socket) -> None:
        peer.shutdown(socket.SHUT_RDWR)

    _interrupted(soak, choose, shut, "the trainer is gone", 0)


def silent(soak: Soak, choose: random.Random) -> None:
    """The trainer says nothing for longer than the engine waits."""

    def wait(wire: Wire, peer: socket.socket) -> None:
        soak.server.control({"op": "end"})  # is answered when the engine has given up

    _interrupted(soak, choose, wait, "silent", HELLO_BYTES)


def _interrupted(soak: Soak, choose: random.Random, act: Act, reason: str, first: int) -> None:
    before = bridge.status(soak.server)
    byte = choose.randrange(first, soak.bytes_of_update - ROOM_BYTES)
    at_act: list[int] = []

    def note(wire: Wire, peer: socket.socket) -> None:
        at_act.append(wire.chunks)
        act(wire, peer)

    with Wire(byte, note).tapped():
        _refused(soak, soak.trainer.become(soak.other_policy()), "", choose.choice(IN_FLIGHT))
    _check_ended(soak, before, at_act[0], reason, f"at byte {byte}")


def _check_ended(soak: Soak, before: bridge.Status, chunks: int, reason: str, when: str) -> None:
    """Nothing changed if no chunk was complete, else the engine is quarantined."""
    soak.server.control({"op": "end"})
    if chunks:
        soak.check_quarantined(reason)
    else:
        soak.check_status(before, when)


def nan(soak: Soak, choose: random.Random) -> None:
    """NaN or Inf anywhere in any tensor."""
    tensors = soak.trainer.become(soak.other_policy())
    name = choose.choice(list(tensors))
    spoilt = tensors[name].clone()
    spoilt.view(-1)[choose.randrange(spoilt.numel())] = choose.choice([torch.nan, -torch.inf])
    _refused(soak, {**tensors, name: spoilt}, "NaN or Inf", choose.choice(IN_FLIGHT))
    soak.check_quarantined("NaN or Inf")


def _refused_at_once(change: Callable[[Soak, random.Random, Tensors], bridge.Named]) -> Fault:
    def fault(soak: Soak, choose: random.Random) -> None:
        before = bridge.status(soak.server)
        tensors = change(soak, choose, soak.trainer.become(soak.other_policy()))
        _refused(soak, tensors, "", choose.choice(IN_FLIGHT))
        soak.check_status(before, "an update that was refused")

    return fault


def _missing(soak: Soak, choose: random.Random, tensors: Tensors) -> bridge.Named:
    del tensors[choose.choice(list(tensors))]
    return tensors


def _doubled(soak: Soak, choose: random.Random, tensors: Tensors) -> bridge.Named:
    rows = list(tensors.items())
    return [*rows, choose.choice(rows)]


def _renamed(soak: Soak, choose: random.Random, tensors: Tensors) -> bridge.Named:
    name = choose.choice(list(tensors))
    tensors[name.replace("weight", "wait")] = tensors.pop(name)
    return tensors


def _of_another_model(soak: Soak, choose: random.Random, tensors: Tensors) -> bridge.Named:
    shape = soak.setting.shape
    change = choose.choice([{"intermediate": 2 * shape.intermediate}, {"layers": shape.layers + 1}])
    return draw(replace(shape, **change), 0, soak.setting.device)


def second(soak: Soak, choose: random.Random) -> None:
    """Another trainer begins in the middle of an update, which is not disturbed."""
    weights = soak.trainer.become(soak.other_policy())
    refusals: list[int | None] = []

    def begin(wire: Wire, peer: socket.socket) -> None:
        client = bridge.another_client(soak.server.address)
        try:
            bridge.update(weights, client, soak.version + choose.randint(0, 3), "abort")
        except EngineError as error:
            refusals.append(error.status)

    with Wire(choose.randrange(soak.bytes_of_update - ROOM_BYTES), begin).tapped():
        soak.update(in_flight=choose.choice(IN_FLIGHT))
    if refusals != [409]:
        raise ViolationError(f"a second trainer was not refused with 409, but {refusals}")


def paused(soak: Soak, choose: random.Random) -> None:
    """The user pauses the engine; an update leaves it paused."""
    mode = choose.choice(["abort", "in_place", "retract"])
    how = choose.choice(IN_FLIGHT) if mode == "abort" else "retract"  # what waits cannot end
    soak.post("/pause_generation", {"mode": mode})
    try:
        soak.update(in_flight=how)
        time.sleep(PAUSED_S)
        early = [s for s in soak.take() if soak.version in s.versions]
        if early:
            raise ViolationError(f"an engine paused with {mode!r} generated: {early}")
    finally:
        soak.post("/continue_generation", {"torch_empty_cache": False})


def released(soak: Soak, choose: random.Random) -> None:
    """The weights' memory is released, which waits for the requests in flight, and resumed.

    There is memory at the resume, always: without it the server ends, and there is none to judge.
    ``tests/sgl_fp8rl/engine/test_memory_saver.py`` has what holds where a resume raises.
    """
    tags = choose.sample(TAGS, choose.randint(1, 3))
    tags = tags if "weights" in tags else [*tags, "weights"]
    soak.post("/release_memory_occupation", {"tags": tags})
    soak.check_quarantined("memory was released")
    _refused(soak, soak.trainer.become(soak.other_policy()), "is released", "abort")
    choose.shuffle(tags)
    for tag in tags:
        soak.post("/resume_memory_occupation", {"tags": [tag]})
    soak.check_quarantined("memory was released")


def _refused(soak: Soak, named: bridge.Named, reason: str, in_flight: str) -> None:
    """An update that must fail."""
    try:
        bridge.update(named, soak.server, soak.next_version(), in_flight)
    except (EngineError, ValueError) as error:
        if reason not in str(error):
            raise ViolationError(f"an update failed with {error}, not {reason!r}") from error
    else:
        raise ViolationError("an update that must fail was committed")


FAULTS: dict[str, Fault] = {
    "trainer killed": killed,
    "NaN": nan,
    "missing tensor": _refused_at_once(_missing),
    "doubled tensor": _refused_at_once(_doubled),
    "renamed tensor": _refused_at_once(_renamed),
    "another model": _refused_at_once(_of_another_model),
    "session silent": silent,
    "second trainer": second,
    "connection cut": cut,
    "paused by the user": paused,
    "release and resume": released,
}


def impossible() -> list[str]:
    """The kinds that this device or this SGLang cannot have: 0.5.23 ends itself at a release on a
    CPU, because it synchronizes a GPU where torch was built for one."""
    try:
        torch.get_device_module().synchronize()
    except RuntimeError:
        return ["release and resume"]
    return []
