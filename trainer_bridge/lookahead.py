"""Chunks that a GPU is at work on, a few steps ahead of what is sent: it never waits for the host.

What is to be done with a chunk is a generator. It yields where it has queued something on the GPU
and would wait for it, and returns the result. While one waits, the next chunks are filled: on the
same stream, and each in another slot, so what is queued within two steps reads a slot before it is
filled again.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from sgl_fp8rl.protocol.image import Steps
from sgl_fp8rl.protocol.manifest import SLOTS

T = TypeVar("T")
assert SLOTS >= 2


class Lookahead(Generic[T]):
    """Work in the order of the chunks."""

    def __init__(self) -> None:
        self._steps: deque[Steps[T]] = deque()
        self._results: dict[Steps[T], T] = {}

    def push(self, steps: Steps[T]) -> Iterator[T]:
        """Begin with one more, and go on with the others by a step; what is done comes out."""
        self._steps.append(steps)
        yield from self._advance()

    def drain(self) -> Iterator[T]:
        """The rest."""
        while self._steps:
            yield from self._advance()

    def _advance(self) -> Iterator[T]:
        for steps in reversed(self._steps):  # what waits least comes first: it queues work
            if steps not in self._results:
                try:
                    next(steps)
                except StopIteration as end:
                    self._results[steps] = end.value
        while self._steps and self._steps[0] in self._results:
            yield self._results.pop(self._steps.popleft())
