"""What adapters do around an update, whatever the framework: versions, ranks, event loops."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from sgl_fp8rl.protocol.values import attempt

T = TypeVar("T")
Pair = tuple[str, torch.Tensor]
"""An HF name and the whole tensor."""


def next_version(step: int | None, last: int) -> int:
    """The policy version of a trainer's step, which may repeat, go back or be missing.

    Args:
        step: the trainer's, or None where it has no number.
        last: the version of this trainer's last update, -1 before the first.

    Returns:
        the step where it is newer than the last version, else the next number.
    """
    return last + 1 if step is None else max(step, last + 1)


def on_all_ranks(action: Callable[[], T], what: str, group: dist.ProcessGroup | None) -> list[T]:
    """Call an action on this rank and on all others; no rank goes on before all are done.

    Args:
        action: what this rank does.
        what: names this rank's action where it fails.
        group: the ranks, which all call this; None for one that is alone.

    Returns:
        what the actions returned, in the ranks' order.

    Raises:
        RuntimeError: the action failed on another rank. Here, its error is raised as it is.
    """
    result, error = attempt(action)
    mine = result, None if error is None else f"{what}: {error}"
    outcomes = [mine] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(outcomes, mine, group=group)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed, and the others end with it: {failure}")
    return [result for result, _ in outcomes]  # type: ignore[misc]


async def asynchronous(weights: Iterable[Pair] | AsyncIterable[Pair]) -> AsyncIterator[Pair]:
    """The pairs of a generator, or of an asynchronous one.

    Args:
        weights: the generator.

    Yields:
        each pair, in its order.
    """
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


async def in_thread(send: Callable[[Iterator[Pair]], T], pairs: AsyncIterator[Pair]) -> T:
    """Call ``send`` in a thread, on this thread's GPU, while the event loop goes on.

    Args:
        send: reads an iterator of the pairs, as ``trainer_bridge.update`` does.
        pairs: what it sends. Each is made in the loop's own thread, where collectives belong.

    Returns:
        what ``send`` returned.
    """
    loop = asyncio.get_running_loop()
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    async def following() -> Pair | None:
        return await anext(pairs, None)

    def stream() -> Iterator[Pair]:
        while (pair := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
            yield pair

    def call() -> T:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a thread begins on the first one
        return send(stream())

    return await asyncio.to_thread(call)
