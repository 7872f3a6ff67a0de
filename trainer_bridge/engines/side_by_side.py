"""Calls to several engines, made side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TypeVar

from trainer_bridge.engines.engine_client import EngineClient, EngineError, InProcessEngine

T = TypeVar("T")
Call = tuple[EngineClient, Callable[[], T]]


def side_by_side(calls: Sequence[Call[T]]) -> list[T | EngineError]:
    """Call all, and wait for the last. An engine of this process is called from this thread.

    Returns:
        what each returned, in order, or its EngineError.
    """
    here = [len(calls) == 1 or isinstance(client, InProcessEngine) for client, _ in calls]
    with ThreadPoolExecutor(max(here.count(False), 1)) as pool:
        others = [
            None if is_here else pool.submit(_tried, call)
            for is_here, (_, call) in zip(here, calls, strict=True)
        ]
        mine = {
            index: _tried(call)
            for index, (is_here, (_, call)) in enumerate(zip(here, calls, strict=True))
            if is_here
        }
        return [
            mine[index] if other is None else other.result() for index, other in enumerate(others)
        ]


def _tried(call: Callable[[], T]) -> T | EngineError:
    try:
        return call()
    except EngineError as error:
        # without its traceback and its cause: frames that hold the result would be in them, and a
        # cycle keeps the trainer's tensors
        return copy(error)
