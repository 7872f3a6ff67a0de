"""The ranks of a trainer that update together: one leads, and shares its results with all."""

import hashlib
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.ranks.rank_values import pack, unpack
from trainer_bridge.sources.parameters import Named

T = TypeVar("T")

WAIT_S = 3600.0
"""How long a rank waits for the leader, who may wait for the end of requests in flight."""
FAST_S, FAST_POLL_S, POLL_S = 0.2, 0.0001, 0.02
CHECKS_PER_S = 50_000
"""What all ranks together ask of the job's store at most: one process answers them, each in 14 us
on a CPU of 2 cores (torch 2.11)."""


class Leader:
    """The first of some ranks speaks with the engine; its results and failures reach the others.

    They are passed on through the job's store (``rank_values.py``). A collective of the trainer's
    own group would end at that group's timeout and occupy its GPU, and a new group must be made by
    all ranks of the job, or has a name that depends on how many groups each rank has (torch 2.11,
    ``_hash_ranks_to_str``).

    Args:
        ranks: global ranks, the same on each of them; empty where this process is alone.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.is_alone = len(ranks) < 2
        self.rank, self.size = (ranks.index(dist.get_rank()), len(ranks)) if ranks else (0, 1)
        """Place of this process among them."""
        self._leads = self.rank == 0
        self.error: Exception | None = None
        """What failed on the leader and was not shared yet."""
        self._is_told = False
        self._store: Any = None if self.is_alone else _get_default_store()
        self._shares = self._collects = 0
        self._followers = len(ranks) - 1
        if self._store is not None:
            group = f"fp8rl/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
            # counted by call, so that a rank that failed alone is in step again at the next one
            self._name = f"{group}/{self._store.add(f'{group}/calls/{self.rank}', 1)}"

    def attempt(self, action: Callable[..., T], *args: Any) -> T | None:
        """Call ``action`` on the leader, unless something failed before.

        An error waits for the next ``share``: until then the ranks must go on gathering together.
        """
        if not self._leads or self.error is not None:
            return None
        result, self.error = attempt(action, *args)
        return result

    def collect(self, value: T, limit_s: float | None = None) -> list[T] | None:
        """The values of all ranks, in their order, on the leader; None on the others.

        Args:
            limit_s: how long the leader waits for the last, by default ``WAIT_S``.

        Raises:
            TimeoutError: a rank did not call it.
        """
        if self._store is None:
            return [value]
        keys = [f"{self._name}/{self._collects}/{rank}" for rank in range(self.size)]
        self._collects += 1
        if not self._leads:
            self._store.set(keys[self.rank], pack(value))
            return None
        is_there = partial(self._store.check, keys[1:])
        self._wait(is_there, "another rank did not call it", limit_s)
        found = [value]
        for key in keys[1:]:
            found.append(unpack(self._store.get(key)))
            self._store.delete_key(key)
        return found

    def each(self, action: Callable[..., T], *args: Any) -> T | str:
        """Call ``action`` on every rank; an error is raised on the leader alone.

        Returns:
            what it returned; an error of another rank as a sentence, for the leader to raise.
        """
        if self._leads:
            return action(*args)
        result, error = attempt(action, *args)
        return cast(T, result) if error is None else f"on rank {dist.get_rank()}: {error}"

    def tell(self, error: BaseException) -> None:
        """Pass an error on that came outside of ``attempt``: others raise it at their ``share``."""
        if self._leads and self._store is not None and not self._is_told:
            self._is_told = True
            if not isinstance(error, Exception):
                error = RuntimeError(f"the first rank was ended by {type(error).__name__}")
            self._store.set(f"{self._name}/{self._shares}", pack(error))

    def share(self, value: T) -> T:
        """The leader's value, on every rank.

        Raises:
            EngineError, ManifestError: an attempt failed; on every rank.
            TimeoutError: the leader, or a rank that it waits for, is gone.
        """
        if self._store is not None:
            key = f"{self._name}/{self._shares}"
            if self._leads:
                self._store.set(key, pack((value,) if self.error is None else self.error))
            else:
                self._wait(partial(self._store.check, [key]), "the first rank sent nothing")
                told = unpack(self._store.get(key))
                if isinstance(told, Exception):
                    self.error = told
                else:
                    (value,) = told
                # not the leader: it does not wait, and may be ahead by any number of updates
                if self._store.add(f"{key}/read", 1) == self._followers:
                    self._store.delete_key(key)
                    self._store.delete_key(f"{key}/read")
            self._shares += 1
        error, self.error = self.error, None
        if error is not None:
            self._is_told = True
            try:
                raise error
            finally:
                del error  # its traceback refers to here: a cycle would keep the update's bucket
        return value

    def _wait(
        self, is_there: Callable[[], bool], absence: str, limit_s: float | None = None
    ) -> None:
        """Poll: a blocking wait in the store would keep NCCL's watchdog from using it."""
        limit_s = WAIT_S if limit_s is None else limit_s
        fast_s, began = max(FAST_POLL_S, self.size / CHECKS_PER_S), time.monotonic()
        while not is_there():
            waited = time.monotonic() - began
            if waited > limit_s:
                raise TimeoutError(f"update: {absence} for {limit_s:.0f} s; see its log")
            time.sleep(fast_s if waited < FAST_S else max(fast_s, POLL_S))


def ranks_of(named: Named, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks that call ``update`` together; empty for one that calls alone.

    They are those of the largest device mesh of the parameters, unless ``group`` says so.
    """
    if group is not None:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    return max((ranks for _, ranks in _holders(named)), key=len, default=())


def check_ranks(named: Named, ranks: tuple[int, ...]) -> None:
    """Check that the ranks that call hold the model."""
    for name, holders in _holders(named):
        if not set(holders) <= set(ranks):
            raise ManifestError(
                f"{name} lies on ranks {_brief(holders)}, and ranks {_brief(ranks)} update; pass "
                f"group=, a process group of all ranks that hold the model"
            )


def _holders(named: Named) -> list[tuple[str, tuple[int, ...]]]:
    """The ranks of each device mesh, with the first parameter on it: a model has few meshes."""
    meshes: dict[DeviceMesh, str] = {}
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            meshes.setdefault(tensor.device_mesh, name)
    return [(name, _ranks_on(mesh)) for mesh, name in meshes.items()]


@lru_cache(64)  # torch makes the tensor of a mesh anew each time
def _ranks_on(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _brief(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
