"""What an adapter of a framework must do, as checks that its maintainers run in their own tests.

An adapter brings weights (an iterator), an engine (an address or a client) and rollouts (tokens
with their versions). Each check raises ``ContractError`` with a sentence. docs/frameworks.md says
how an adapter is made.

Where several ranks update together, all of them call ``check_updates`` and ``check_resume``, with
their ``group``; the engine is that of the first, and the others pass None.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES
from sgl_fp8rl.protocol.checkpoint_headers import read_headers, weight_files
from sgl_fp8rl.protocol.manifest import TIED_HEAD
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.adapters.updates import on_all_ranks
from trainer_bridge.engines.engine_client import EngineError, connect

Pairs = Iterator[tuple[str, torch.Tensor]]
Walk = Callable[[], Pairs]
"""Begins another walk over the weights, as the framework does at each update."""
Sync = Callable[[Pairs, int | None], int]
"""Updates in the framework's own way to what the iterator brings, at a step of the trainer or at
one without a number; the policy version that the adapter says it was.

It raises where the update failed, on the rank that led it at least."""
Sample = Callable[[], list[int]]
"""Samples one request in the framework's way: the policy version of each of its tokens.

It raises where the engine refuses the request; a rank that does not sample returns nothing."""
STEPS = (0, 0, 7, None, 1)
"""A trainer's, which may repeat, skip, be missing, or begin again."""
CHANGING = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
"""Sampling options that change logprobs, with values that do."""


class ContractError(AssertionError):
    """An adapter that would fail, or lose a guarantee, in training."""


def check_weights(walk: Walk, checkpoint: Path) -> None:
    """The iterator brings every tensor of the checkpoint once, whole, at each walk.

    Args:
        walk: begins a walk over what the adapter sends.
        checkpoint: folder of the HF checkpoint that was trained from.

    Raises:
        ContractError: it does not.
    """
    specs = read_headers(weight_files(checkpoint))
    for _ in range(2):
        found: set[str] = set()
        for name, tensor in walk():
            shape = tuple(tensor.shape)
            wanted = specs[name].shape if name in specs else shape
            faults = {
                "comes twice in one walk; yield it once": name in found,
                "is not in the checkpoint; yield the names of the HF checkpoint": (
                    name not in specs and name != TIED_HEAD
                ),
                "is sharded; gather it before the yield": isinstance(tensor, DTensor),
                f"is {tensor.dtype}; yield BF16, FP16 or FP32": tensor.dtype not in WEIGHT_DTYPES,
                f"has shape {shape}, in the checkpoint {wanted}; yield whole tensors in the "
                f"checkpoint's layout": shape != wanted,
            }
            for fault, is_so in faults.items():
                _require(not is_so, f"{name} {fault}")
            found.add(name)
        missing = sorted(specs.keys() - found - {TIED_HEAD})
        _require(not missing, f"{missing[:1]} did not come; yield every tensor at every walk")


def check_engine(engine: Any) -> None:
    """Control messages get their reply, and refusals come as ``EngineError``.

    Args:
        engine: what the adapter gives ``update`` as its engine.

    Raises:
        ContractError: they do not.
    """
    status = connect(engine).control({"op": "status"})
    _require(
        {"run", "version", "state"} <= status.keys(),
        f"the reply to a status message is {status}; return the engine's reply as it is",
    )
    try:
        reply: Any = connect(engine).control({"op": "nothing"})
    except EngineError as error:
        _require(
            error.status == 400, f"a refusal has status {error.status}; keep the engine's, 400"
        )
        _require(len(str(error)) > 0, "a refusal has no sentence; keep the engine's")
    except Exception as error:
        raise ContractError(f"a refusal came as {error!r}; raise EngineError") from error
    else:
        raise ContractError(f"a refusal came as the reply {reply}; raise EngineError")


def check_updates(
    engine: Any, walk: Walk, sync: Sync, sample: Sample, group: dist.ProcessGroup | None = None
) -> None:
    """Updates commit, fail and heal as docs/guarantees.md says, seen through the adapter.

    Afterwards the engine serves what ``walk`` brings.

    Args:
        engine: what the adapter gives ``update`` as its engine.
        walk: begins a walk over what the adapter sends.
        sync: the adapter's own update, of such a walk and a step.
        sample: samples through the adapter.
        group: the ranks that update together, where there are several.

    Raises:
        ContractError: they do not.
    """
    trial = _Trial(engine, walk, sync, sample, group)
    for step in STEPS:
        trial.commits(step)
    trial.fails(9)
    trial.commits(9)


def check_resume(
    engine: Any,
    walk: Walk,
    start: Callable[[], Sync],
    sample: Sample,
    group: dist.ProcessGroup | None = None,
) -> None:
    """A trainer that is started again goes on at an older step, as a run of its own.

    Args:
        engine: as in ``check_updates``.
        walk: as in ``check_updates``.
        start: begins a training, in a process of its own or as if it were.
        sample: as in ``check_updates``.
        group: as in ``check_updates``.

    Raises:
        ContractError: it does not.
    """
    first = _Trial(engine, walk, start(), sample, group)
    first.commits(5)
    resumed = _Trial(engine, walk, start(), sample, group)
    resumed.commits(3)
    _require(
        resumed.run != first.run,
        f"the resumed trainer is run {resumed.run}, as the one before; name its run anew, so that "
        f"the engine refuses the one before",
    )


def check_refusals(set_up: Callable[[Mapping[str, Any]], object], names: Iterable[str]) -> None:
    """Sampling options that change logprobs are refused, and only with them.

    Args:
        set_up: begins to sample with these options beside the framework's defaults.
        names: those of ``CHANGING`` that the framework has.

    Raises:
        ContractError: they are not.
    """
    for name in (None, *names):
        options = {} if name is None else {name: CHANGING[name]}
        refusal = None
        try:
            set_up(options)
        except ValueError as error:
            refusal = str(error)
        if name is None:
            _require(refusal is None, f"the defaults are refused: {refusal}")
        else:
            _require(
                refusal is not None and name in refusal.replace("-", "_"),
                f"{options} gives {refusal or 'no error'}; raise a ValueError that names it",
            )


class _Trial:
    """The updates of one trainer, on all its ranks."""

    def __init__(
        self, engine: Any, walk: Walk, sync: Sync, sample: Sample, group: dist.ProcessGroup | None
    ) -> None:
        self._engine, self._walk, self._group = engine, walk, group
        self._sync, self._sample = sync, sample
        self._whole = sum(1 for _ in walk())
        self.run: str | None = None
        self._version = -1

    def commits(self, step: int | None) -> None:
        """Require that an update at this step becomes a policy, and that it samples."""
        said, errors = self._update(self._walk(), step)
        _require(
            not errors,
            f"the update at step {step} raised {errors[:1]}; give update the version "
            f"max(step, last + 1), and a resumed trainer a run of its own",
        )
        status = self._status()
        run, version = status["run"], status["version"]
        _require(
            version == said,
            f"the adapter says that step {step} is version {said}, and the engine has {version}; "
            f"say what update was given",
        )
        _require(
            self.run in (None, run) and version > self._version,
            f"after version {self._version} of run {self.run}, step {step} is version {version} of "
            f"run {run}; update at each step, in one run",
        )
        self.run, self._version = run, version
        versions, errors = self._sampled()
        _require(
            not errors and versions == {version},
            f"tokens of version {version} are said to be of {sorted(versions)} {errors[:1]}; "
            f"return meta_info['policy_version'], which has an entry for each token",
        )

    def fails(self, step: int) -> None:
        """Require that an update with a NaN fails for all to see."""
        _, errors = self._update(_with_nan(self._walk()), step)
        _require(bool(errors), "a tensor held NaN, and no rank raised; let update's error pass")
        state = self._status()["state"]
        _require(state == State.QUARANTINED.value, f"after a failed update the engine is {state}")
        versions, errors = self._sampled()
        _require(
            bool(errors),
            f"a quarantined engine was sampled, versions {sorted(versions)}; raise its 503",
        )

    def _update(self, pairs: Pairs, step: int | None) -> tuple[int, list[str]]:
        """The version that the first rank says, and what ranks raised; each must read it all."""
        read: list[str] = []
        said, errors = self._each(lambda: self._sync(_noted(pairs, read), step))
        counts = on_all_ranks(lambda: len(read), "count", self._group)
        _require(
            set(counts) == {self._whole},
            f"{counts} of {self._whole} tensors were read at step {step}, which raised "
            f"{errors[:1]}; read the iterator to its end, since others wait in its collectives",
        )
        return said[0] or 0, errors

    def _sampled(self) -> tuple[set[int], list[str]]:
        found, errors = self._each(self._sample)
        return {version for versions in found for version in versions or ()}, errors

    def _status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            is_first = self._group is None or dist.get_rank(self._group) == 0
            return connect(self._engine).control({"op": "status"}) if is_first else {}

        return on_all_ranks(ask, "status", self._group)[0]

    def _each(self, call: Callable[[], Any]) -> tuple[list[Any], list[str]]:
        """What each rank returned, or None, and what ranks raised."""

        def outcome() -> tuple[Any, str | None]:
            value, error = attempt(call)
            return value, None if error is None else repr(error)

        outcomes = on_all_ranks(outcome, "call", self._group)
        return [value for value, _ in outcomes], [e for _, e in outcomes if e is not None]


def _noted(pairs: Pairs, names: list[str]) -> Pairs:
    """The same, and the names of those that were read."""
    for name, tensor in pairs:
        names.append(name)
        yield name, tensor


def _with_nan(pairs: Pairs) -> Pairs:
    """The second matrix is spoiled: something was written before it."""
    matrices = 0
    for name, tensor in pairs:
        matrices += tensor.dim() > 1
        if matrices == 2 and tensor.dim() > 1:
            tensor = torch.full_like(tensor, float("nan"))
        yield name, tensor


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ContractError(otherwise)
