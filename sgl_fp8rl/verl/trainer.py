"""verl's synchronous trainer, with our metrics of the mismatch and their alarms among its own.

``trainer.v1.trainer_mode=fp8rl`` selects it; ``plugin`` registers it, in the task runner too. Each
logger of ``trainer.logger`` then has ``fp8rl/*``.
"""

from typing import Any

import transfer_queue  # type: ignore[import-not-found]
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from sgl_fp8rl.constants import NAME
from trainer_bridge.adapters.rollouts import mismatch_log

FIELDS = ["old_log_probs", "rollout_log_probs", "response_mask"]


@register_trainer(NAME)
class Trainer(PPOTrainerSync):  # type: ignore[misc]
    """A step's metrics are of the tokens that verl's correction kept; there are none with
    ``calculate_log_probs=False``, or where it kept no token."""

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = "sync"  # verl asks for this name again, for its buffer
        super().__init__(config)

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        batch = super().step(metrics, timing_raw)
        found = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS
        ).to_padded_tensor()
        if all(name in found.keys() for name in FIELDS):  # noqa: SIM118  (it is a TensorDict)
            trainer, rollout, mask = (found[name] for name in FIELDS)
            metrics |= mismatch_log(trainer, rollout, mask.bool())
        return batch
