"""A bucket in host memory: for engines on a CPU, for trainers without a GPU, and for those whose
GPU memory the engine cannot open.

Its descriptor is passed over each rank's socket. A rank on another host gets its content instead.
"""

import secrets

from sgl_fp8rl.protocol.host_memory import HostMemory
from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport.rank_client import Ranks


class HostBucket:
    """Host memory of ``nbytes``, filled by the trainer and read by every rank.

    Raises:
        EngineError: there is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = secrets.token_hex(16)
        try:
            self._memory = HostMemory(nbytes)
        except OSError as error:
            raise EngineError(f"a bucket of {nbytes} bytes could not be made: {error}") from error
        self.content, self.close = self._memory.content, self._memory.close

    def share(self, ranks: Ranks) -> None:
        """Have every rank open it, unless all have."""
        if self.name not in ranks.known:
            message = {"op": "bucket", "name": self.name, "bytes": self.content.numel()}
            ranks.ask(message, (self._memory.fd,))
