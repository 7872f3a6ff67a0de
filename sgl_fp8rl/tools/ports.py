"""TCP ports for what listens later than it is told to.

SGLang 0.5.17 picks the port of ``torch.distributed`` among those that the kernel also gives to
connections, and listens on it half a minute later: an engine now and then finds it taken, and kills
itself. These lie below, and each is held from the choice to the end of its owner.
"""

import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the ports that Linux gives to outgoing connections (from 32768 on)."""


class Port:
    """A free port; its UDP namesake is held as a mark, which ends with the process.

    Raises:
        OSError: there is none.
    """

    def __init__(self) -> None:
        for number in random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST):
            mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                mark.bind(("127.0.0.1", number))
                with socket.socket() as probe:
                    probe.bind(("", number))
            except OSError:
                mark.close()
                continue
            self.number, self._mark = number, mark
            return
        raise OSError(f"no port from {FIRST} to {LAST} is free; end what listens on them")

    def close(self) -> None:
        """Let others have it."""
        self._mark.close()

    def __enter__(self) -> "Port":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
