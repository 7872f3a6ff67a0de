"""verl's own parts of disaggregated training over a real Ray: its server manager, which starts a
standalone replica of ours, its workers and its manager of checkpoint engines.

The trainer's ranks are ours, with what verl's have to do with weights; ``test_trainer`` has verl's
own. The checkpoint engine is that of ``gloo``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from sgl_fp8rl.verl.replica import Replica
from tests.integrations.verl import gloo
from tests.integrations.verl.cluster import (
    RANKS,
    Cluster,
    handed_over,
    local_ray,
    model_config,
    rollout_config,
    sharded,
)

BUCKET_BYTES = 256 << 10
"""So that larger matrices of the tiny model come in several buckets, and norms share one."""
ENGINE = CheckpointEngineConfig(
    backend=gloo.BACKEND,
    custom_backend_module=gloo.__name__,
    engine_kwargs={gloo.BACKEND: {"bucket_bytes": BUCKET_BYTES}},
)
BROKEN = "a gather failed"


class Trainer(Worker):
    """A rank of verl's trainer without training: its calls of the checkpoint engine are verl's."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        initialize_global_process_group_ray(backend="gloo")
        import_external_libs(ENGINE.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            ENGINE.backend,
            is_master=self.rank == 0,
            bucket_size=ENGINE.update_weights_bucket_megabytes << 20,
            **ENGINE.engine_kwargs[ENGINE.backend],
        )
        self.actor = SimpleNamespace(engine=self)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, checkpoint: Path, nan: str | None, lost: str | None) -> None:
        """Take the weights of a checkpoint, with NaN in one tensor, or one that is not gathered."""
        self._loaded = checkpoint, nan, lost

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._gathered(*self._loaded), None

    def _gathered(
        self, checkpoint: Path, nan: str | None, lost: str | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in handed_over(sharded(checkpoint)):
            if name == lost:
                raise RuntimeError(BROKEN)
            yield name, torch.full_like(tensor, torch.nan) if name == nan else tensor


class ServerManager(LLMServerManager):
    """Without verl's registry, as in ``cluster``."""

    rollout_replica_class = Replica


class Manager(CheckpointEngineManager):
    """verl's; requests may arrive in the middle of an update."""

    arriving = 0
    arrived: list[Any]

    def build_process_group(self, rollout: Any) -> None:
        server = Cluster(self.replicas[0], [])
        self.arrived = [server.send(8) for _ in range(self.arriving)]
        super().build_process_group(rollout)


class Disaggregated(Cluster):
    """What a test works with."""

    def __init__(self, servers: Any, trainer: Any) -> None:
        (replica,) = servers.get_replicas()
        super().__init__(replica, replica.workers)
        self.trainer = trainer
        self.manager = Manager(ENGINE, trainer, [replica])
        self.client = servers.get_client(client_cls=FullyAsyncLLMServerClient)

    def update(
        self, checkpoint: Path, step: int, nan: str | None = None, lost: str | None = None
    ) -> None:
        """As verl's trainer after a step."""
        self.trainer.load(checkpoint, nan, lost)
        self.manager.update_weights(global_steps=step)


@contextmanager
def disaggregated(checkpoint: Path) -> Iterator[Disaggregated]:
    """Ray, a standalone replica and a trainer, each of two ranks; at the end all are gone."""
    # of both there are as many as verl asks for
    with local_ray(num_cpus=16, num_gpus=RANKS):
        pool = RayResourcePool([RANKS], use_gpu=False, max_colocate_count=1)
        made = RayClassWithInitArgs(ray.remote(Trainer))
        trainer = RayWorkerGroup(pool, made, use_gpu=False)
        rollout = rollout_config(
            nnodes=1, n_gpus_per_node=RANKS, free_cache_engine=True, checkpoint_engine=ENGINE
        )
        config = SimpleNamespace(rollout=rollout, model=model_config(checkpoint))
        servers = ServerManager.create(config=SimpleNamespace(actor_rollout_ref=config))
        yield Disaggregated(servers, trainer)
