"""Requests that are in flight all the time."""

import random
import threading
import time
from queue import SimpleQueue

from tests.soak import bridge

COUNT = 4
PROMPT_TOKENS = 4, 40
NEW_TOKENS = 4, 48
SHARED_PROMPTS = 8
"""Half of the requests repeat one of these: a prefix of an old version would be found again."""
RETRY_S = 0.05
CREDIT = 24
"""Requests that are begun after a ``grant``: what is sampled must not outrun the judge."""


class Clients:
    """Threads that each ask without pause; refusals of a quarantined engine are counted.

    Args:
        address: of the server.
        vocabulary: token ids are below it.
        seed: of prompts and lengths.
    """

    def __init__(self, address: str, vocabulary: int, seed: int) -> None:
        self.sampled: SimpleQueue[bridge.Sampled] = SimpleQueue()
        self.errors: SimpleQueue[Exception] = SimpleQueue()
        """Anything but a refusal: a defect."""
        self.refused = 0
        self._address, self._vocabulary = address, vocabulary
        shared = random.Random(seed)
        self._shared = [self._prompt(shared) for _ in range(SHARED_PROMPTS)]
        self._stop = threading.Event()
        self._credit = 0
        self._granted = threading.Condition()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(f"{seed} {n}"),))
            for n in range(COUNT)
        ]
        for thread in self._threads:
            thread.daemon = True  # a server that hangs must not keep the soak from its end
            thread.start()

    def _prompt(self, choose: random.Random) -> list[int]:
        return [choose.randrange(self._vocabulary) for _ in range(choose.randint(*PROMPT_TOKENS))]

    def _ask(self, choose: random.Random) -> None:
        while True:
            with self._granted:
                self._granted.wait_for(lambda: self._credit > 0 or self._stop.is_set())
                self._credit -= 1
            if self._stop.is_set():
                return
            prompt = choose.choice(self._shared) if choose.random() < 0.5 else self._prompt(choose)
            try:
                found = bridge.sample(self._address, [prompt], choose.randint(*NEW_TOKENS))
                for sampled in found:
                    self.sampled.put(sampled)
            except Exception as error:  # noqa: BLE001  (the soak's own thread reports it)
                if not (bridge.is_refusal(error) or bridge.is_abort(error)):
                    self.errors.put(error)
                    return
                self.refused += 1
                with self._granted:
                    self._credit += 1
                time.sleep(RETRY_S)

    def grant(self) -> None:
        """Let the clients ask."""
        with self._granted:
            self._credit = CREDIT
            self._granted.notify_all()

    def take(self) -> list[bridge.Sampled]:
        """The sequences since the last call.

        Raises:
            Exception: of a client, if one failed.
        """
        if not self.errors.empty():
            raise self.errors.get()
        return [self.sampled.get() for _ in range(self.sampled.qsize())]

    def close(self) -> None:
        """Ask no more, and wait for what is in flight."""
        self._stop.set()
        with self._granted:
            self._granted.notify_all()
        for thread in self._threads:
            thread.join(timeout=60)
