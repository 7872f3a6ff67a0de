"""The buckets of trainers on other hosts, kept in an engine's main process between sessions."""

from weakref import WeakKeyDictionary, WeakValueDictionary

from sgl_fp8rl.protocol.nixl_memory import Exposed
from sgl_fp8rl.protocol.place import HostMemory


class RelayMemory:
    """The buckets by name, each as long as a relay uses it.

    Args:
        most_bytes: of a bucket.
        most_snapshot_bytes: of an update that may be sent as changes, and of these; 0 for none.
        network: by what chunks come, see ``Fp8RLServerArgs``.
    """

    def __init__(self, most_bytes: int, most_snapshot_bytes: int = 0, network: str = "tcp") -> None:
        self._network = network
        self.most_bytes, self.most_snapshot_bytes = most_bytes, most_snapshot_bytes
        self.by_name: WeakValueDictionary[str, HostMemory] = WeakValueDictionary()
        """The buckets, each as long as a relay uses it."""
        self.exposed: WeakKeyDictionary[HostMemory, Exposed] = WeakKeyDictionary()
        """Of these, where the trainer writes into them by NIXL."""

    def make(self, name: str, size: int) -> HostMemory:
        """A new bucket.

        Raises:
            OSError: there is not enough memory.
            NixlError: it cannot be exposed.
        """
        memory = HostMemory(size)
        if self._network == "nixl":
            self.exposed[memory] = Exposed(memory.content)
        self.by_name[name] = memory
        return memory

    def retire(self, memory: HostMemory | None) -> None:
        """After a failed update: what is still on its way to exposed memory must not come into the
        next one, so that gets other memory."""
        if memory is not None and self.exposed.pop(memory, None) is not None:
            for name in [name for name, kept in self.by_name.items() if kept is memory]:
                del self.by_name[name]
