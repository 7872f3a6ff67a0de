"""slime 0.3.1 and miles: a Megatron trainer that updates fp8rl engines started beside it.

Both call ``--custom-megatron-init-path trainer_bridge.adapters.slime.init`` in each train actor,
before they choose the class that moves weights, and both have the same contract for that class.
"""

import logging
import secrets
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import trainer_bridge
from sgl_fp8rl.protocol.states import ABORT
from trainer_bridge import UpdateResult
from trainer_bridge.adapters.updates import on_all_ranks

FRAMEWORKS = ("slime", "miles")
ACTOR = "backends.megatron_utils.actor"
ITERATOR = "backends.megatron_utils.update_weight.hf_weight_iterator_base"
OTHER_WAY = "only whole tensors that go to running engines can be sent to an fp8rl engine"
OTHER_LOGPROBS = "the engine's logprobs would differ from what the trainer computes"
REQUIRED: dict[str, tuple[Any, str]] = {
    "update_weight_mode": ("full", OTHER_WAY),
    "update_weight_transport": ("nccl", OTHER_WAY),
    "update_weight_transfer_mode": ("broadcast", OTHER_WAY),
    "rollout_top_p": (1.0, OTHER_LOGPROBS),
    "rollout_top_k": (-1, OTHER_LOGPROBS),
}
"""Options that slime or miles has, the one value that is supported, and why. The first three choose
the class that ``init`` replaces."""
logger = logging.getLogger(__name__)


def init(args: Namespace) -> None:
    """Put ``Updater`` before the framework's class, in this train actor.

    Args:
        args: the framework's options.

    Raises:
        ValueError: an option asks for what an fp8rl engine cannot do.
        RuntimeError: this process is not a train actor of slime or miles.
    """
    loaded = [name for name in FRAMEWORKS if f"{name}.{ACTOR}" in sys.modules]
    if len(loaded) != 1:
        raise RuntimeError(
            f"{__name__}.init is for a train actor of slime or of miles, and this process has "
            f"loaded {' and '.join(loaded) or 'neither'}; pass it as --custom-megatron-init-path"
        )
    _check(args)
    actor: Any = import_module(f"{loaded[0]}.{ACTOR}")
    if not hasattr(actor, "UpdateWeightFromDistributed"):
        raise RuntimeError(f"{actor.__name__} moves weights in another way; see docs/frameworks.md")
    actor.UpdateWeightFromDistributed = partial(Updater, loaded[0])


class Updater:
    """Moves a policy to each external engine: engine *i* is led by rank *i*, and all ranks walk
    the framework's iterator together, to its end also where an update fails.

    With more engines than ranks the weights are walked again for the next engines.

    Raises:
        ValueError: LoRA, or a trainer that quantizes.
    """

    def __init__(
        self,
        framework: str,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        weights_getter: Callable[[], Mapping[str, torch.Tensor]],
        *,
        model_name: str,
        quantization_config: dict[str, Any] | None,
        is_lora: bool = False,
    ) -> None:
        if is_lora:
            raise ValueError(
                "an fp8rl engine serves no LoRA adapters; train all weights, without --lora-rank"
            )
        if quantization_config is not None:
            raise ValueError(
                f"--hf-checkpoint {args.hf_checkpoint} is quantized, and {framework} would "
                f"quantize what it sends; pass the BF16 checkpoint, since the engine quantizes"
            )
        self.weight_version = 0  # the actor may set it after this
        self._args = args
        self._weights_getter = weights_getter
        self._iterator = import_module(f"{framework}.{ITERATOR}").HfWeightIteratorBase.create(
            args=args, model=model, model_name=model_name, quantization_config=None
        )
        self._utils = import_module(f"{framework}.utils.distributed_utils")
        self._is_connected = False
        self._metrics: dict[str, float] = {}
        # one run for all engines, whichever rank leads them; a trainer that resumes is a new one
        run = [secrets.token_hex(4)]
        dist.broadcast_object_list(run, src=0, group=self._utils.get_gloo_group())
        self._run = run[0]

    def connect_rollout_engines(
        self, rollout_engines: Sequence[Any], rollout_engine_lock: Any, **_: Any
    ) -> None:
        """Check that the framework's engines are those of ``--rollout-external-engine-addrs``.

        Raises:
            ValueError: there are more or fewer.
        """
        addresses = self._args.rollout_external_engine_addrs
        if len(rollout_engines) != len(addresses):
            raise ValueError(
                f"--rollout-external-engine-addrs names {len(addresses)} engines, and the rollout "
                f"has {len(rollout_engines)}; name each engine once"
            )
        self._is_connected = True

    def is_rollout_engines_fresh(self) -> bool:
        """Whether engines are connected; asked by miles."""
        return self._is_connected

    def mark_engine_connection_stale(self) -> None:
        """Let miles connect again."""
        self._is_connected = False

    @torch.no_grad()
    def update_weights(self) -> None:
        """Bring all engines to the trainer's weights; all ranks call it.

        Raises:
            EngineError, ManifestError: as ``trainer_bridge.update``, on the rank that led it.
            RuntimeError: an update failed on another rank.
        """
        self.weight_version += 1
        engines = [_url(address) for address in self._args.rollout_external_engine_addrs]
        world = dist.get_world_size()
        results: list[UpdateResult] = []
        for first in range(0, len(engines), world):
            led = dict(enumerate(engines[first : first + world]))
            results += self._send(led.get(dist.get_rank()))
        self._metrics = {
            "perf/fp8rl_update_seconds": max(each.seconds["total"] for each in results),
            "perf/fp8rl_update_bytes": float(sum(each.bytes for each in results)),
        }

    def pop_metrics(self) -> dict[str, float]:
        """Of the last update: wall time of the slowest engine, in seconds, and payload in bytes,
        of all engines; the same on every rank, and only once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _send(self, engine: str | None) -> list[UpdateResult]:
        """One walk of all ranks, each of which may lead an engine; what came of them all."""

        def walk() -> UpdateResult | None:
            tensors = self._tensors()
            if engine is None:
                for _ in tensors:
                    pass
                return None
            result = trainer_bridge.update(
                tensors,
                engine,
                version=self.weight_version,
                run=self._run,
                in_flight=getattr(self._args, "pause_generation_mode", ABORT),
                announce=self._args.hf_checkpoint,
            )
            logger.info("%s: %s", engine, result)
            return result

        what = f"version {self.weight_version} of {engine or 'no engine'}"
        results = on_all_ranks(walk, what, self._utils.get_gloo_group())
        return [result for result in results if result is not None]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for chunk in self._iterator.get_hf_weight_chunks(self._weights_getter()):
            yield from chunk


def _url(address: str) -> str:
    return address if "://" in address else f"http://{address}"


def _check(args: Namespace) -> None:
    if args.colocate or not args.rollout_external_engine_addrs:
        raise ValueError(
            "an engine that slime or miles starts does not know the quantization fp8rl; start it "
            "with `sglang serve --quantization fp8rl`, and pass --rollout-external-engine-addrs "
            "without --colocate"
        )
    for name, (value, why) in REQUIRED.items():
        given = getattr(args, name, value)
        if given != value:
            raise ValueError(f"--{name.replace('_', '-')} {given}: {why}; set it to {value}")
    if getattr(args, "pause_generation_mode", ABORT) == "in_place":
        raise ValueError(
            "--pause-generation-mode in_place keeps a KV cache of older weights; set it to retract "
            "or abort"
        )
