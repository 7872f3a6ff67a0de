"""The requests that run in a simulated engine, with sums that are kept instead of taken anew."""

from dataclasses import dataclass, field
from heapq import heappop, heappush

CLIP = 4096
"""New tokens of a request that SGLang reserves memory for, at most."""


@dataclass(eq=False)
class Sample:
    """A request. While it runs, ``done`` is of when it started to."""

    prompt: int
    response: int
    limit: int
    done: int = 0
    start: int = 0
    """When it would have had no token yet, by the clock of those that run."""
    turn: int = 0
    """Which of all starts was its last one; 0 while it waits."""

    @property
    def held(self) -> int:
        return self.prompt + self.done

    @property
    def may_need(self) -> int:
        """New tokens that SGLang reserves memory for."""
        return min(self.limit - self.done, CLIP)

    @property
    def near(self) -> int:
        """When it may need less than ``CLIP``."""
        return self.start + self.limit - CLIP


Heap = list[tuple[int, int, int, Sample]]
"""The third number is a turn, of either sign: those of an earlier one count for nothing."""


@dataclass
class Running:
    """Each of them makes a token a step, by which the clock goes on."""

    size: int = 0
    clock: int = 0
    tokens: int = 0
    """That they hold."""
    prompts: int = 0
    """Tokens of these."""
    limits: int = 0
    """New tokens that they may have, summed."""
    _turns: int = 0
    _ends: Heap = field(default_factory=list)
    _nears: Heap = field(default_factory=list)
    _shortest: Heap = field(default_factory=list)
    _far: int = 0
    """How many may need ``CLIP``."""
    _near: int = 0
    """When all others may need nothing, summed."""

    @property
    def may_need(self) -> int:
        """New tokens that SGLang reserves memory for."""
        return CLIP * self._far + self._near - (self.size - self._far) * self.clock

    def add(self, sample: Sample) -> None:
        """Start one."""
        self._turns += 1
        turn = self._turns
        sample.turn, sample.start = turn, self.clock - sample.done
        self.size += 1
        self.tokens += sample.held
        self.prompts += sample.prompt
        self.limits += sample.limit
        heappush(self._ends, (sample.start + sample.response, 0, turn, sample))
        heappush(self._nears, (sample.near, 0, turn, sample))
        heappush(self._shortest, (-sample.start, -sample.prompt, -turn, sample))
        self._far += 1
        self._pass()

    def remove(self, sample: Sample) -> None:
        """End one, or have it wait again."""
        sample.turn, sample.done = 0, self.clock - sample.start
        self.size -= 1
        self.tokens -= sample.held
        self.prompts -= sample.prompt
        self.limits -= sample.limit
        if sample.near > self.clock:
            self._far -= 1
        else:
            self._near -= sample.near + CLIP

    def steps(self) -> int:
        """Until the first of them ends."""
        return _top(self._ends)[0] - self.clock

    def advance(self, steps: int) -> None:
        """Make tokens."""
        self.clock += steps
        self.tokens += steps * self.size
        self._pass()

    def finish(self) -> bool:
        """Remove those that are at their end; whether there were any."""
        before = self.size
        while self.size and self.steps() <= 0:
            self.remove(self._ends[0][3])
        return self.size < before

    def shortest(self) -> Sample:
        """What SGLang retracts first: the shortest output, then the longest prompt."""
        return _top(self._shortest)[3]

    def _pass(self) -> None:
        while self._nears and self._nears[0][0] <= self.clock:
            _, _, turn, sample = heappop(self._nears)
            if turn == sample.turn:
                self._far -= 1
                self._near += sample.near + CLIP


def _top(heap: Heap) -> tuple[int, int, int, Sample]:
    while abs(heap[0][2]) != heap[0][3].turn:
        heappop(heap)
    return heap[0]
