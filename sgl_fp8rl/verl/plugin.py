"""Entry point of the group ``verl.plugins``, which verl imports in each of its processes.

It registers a replica and an adapter for the rollout ``sglang``. Both are subclasses of verl's and
behave as these do unless the rollout has ``quantization=fp8rl``; neither registry knows the
configuration, so the choice is made where it is known. It also registers our trainer, once verl's
own are imported: that takes seconds, and most of verl's processes do not need them.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any

from sgl_fp8rl.after_import import after_import
from sgl_fp8rl.constants import NAME

ROLLOUT = "sglang"
ADAPTER = ("sglang", "async")
STOCK_ADAPTER = "verl.workers.rollout.sglang_rollout.sglang_rollout.ServerAdapter"
TRAINERS = "verl.trainer.ppo.v1"
"""Of verl: whoever looks a trainer up imports it."""
logger = logging.getLogger(__name__)


def register() -> None:
    """Put our classes before verl's.

    Raises:
        RuntimeError: another plugin has replaced verl's adapter.
        ImportError: this verl has no such registries.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    found = _ROLLOUT_REGISTRY.get(ADAPTER)
    if found != STOCK_ADAPTER:
        raise RuntimeError(
            f"verl's rollout {ROLLOUT} is {found}, not verl's own; leave the other plugin out with "
            f"VERL_USE_EXTERNAL_PLUGINS={NAME}"
        )
    stock = RolloutReplicaRegistry._registry[ROLLOUT]
    RolloutReplicaRegistry.register(ROLLOUT, _replica_after(stock))
    _ROLLOUT_REGISTRY[ADAPTER] = f"{__package__}.adapter.Adapter"


def _replica_after(stock: Callable[[], type]) -> Callable[[], type]:
    def load() -> Any:
        stock()  # it also prepares the process for the import of SGLang
        from sgl_fp8rl.verl.replica import Replica

        return Replica

    return load


def register_trainer() -> None:
    """Import our trainer, which registers it; verl's own stay usable without it."""
    try:
        importlib.import_module(f"{__package__}.trainer")
    except Exception as error:  # noqa: BLE001  (what verl itself imports there may fail as well)
        logger.error(
            "sgl-fp8rl's trainer is not available in verl, so trainer.v1.trainer_mode=%s will be "
            "refused: %s",
            NAME,
            error,
        )


try:
    register()
    after_import(TRAINERS, register_trainer)
except Exception as error:
    # verl logs what a plugin raises for debugging only, and goes on
    logger.error(
        "sgl-fp8rl is not available in verl, so rollout.quantization=%s will be refused: %s",
        NAME,
        error,
    )
    raise
