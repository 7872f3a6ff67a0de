"""What adapters make of rollouts, whatever the framework: batches of one policy, its metrics."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import trainer_bridge
from sgl_fp8rl.constants import NAME
from trainer_bridge import Rollout, mismatch_metrics
from trainer_bridge.metrics.alarms import announce, check_alarms
from trainer_bridge.ranks.group import LOCAL

LOGGED = ("mismatch_kl_k3", "ess", "chi2_seq", "logprob_abs_diff_max")
"""What is logged of ``mismatch_metrics``, beside the number of alarms."""


def whole_rollout(
    engine: Any, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], version: int
) -> Rollout:
    """A rollout in which every request has tokens, all of one policy version: where a sample cannot
    be left out.

    Args:
        engine: as ``trainer_bridge.rollout`` has it.
        prompts: token ids of each request.
        sampling: SGLang's sampling parameters.
        version: the policy that must sample every token.

    Returns:
        the rollout, without errors.

    Raises:
        ValueError, EngineError: as ``trainer_bridge.rollout``; also where one request failed.
        RuntimeError: a request was aborted.
    """
    batch = trainer_bridge.rollout(engine, prompts, sampling, expected_version=version)
    failed = without_tokens(batch)
    if failed:
        raise batch.errors.get(failed[0]) or RuntimeError(
            f"{len(failed)} of {len(prompts)} requests were aborted or have no tokens; let nothing "
            f"else update or abort this engine, and resume from a checkpoint"
        )
    return batch


def without_tokens(batch: Rollout) -> list[int]:
    """The samples that cannot be trained on: those that failed, were aborted or have no token.

    Args:
        batch: a rollout.

    Returns:
        their indices.
    """
    complete = batch.is_complete_B.tolist()
    return [index for index, row in enumerate(batch.tokens) if not (row and complete[index])]


def mismatch_log(
    trainer_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """What a step logs of the mismatch, by its name in a framework's logs; alarms also warn.

    Args:
        trainer_BT: the trainer's logprobs of the sampled tokens.
        rollout_BT: the engine's.
        mask_BT: which of them count.
        group: the ranks to reduce over; the first of them warns for all.

    Returns:
        the metrics, the same on every rank; none where no token counts on any rank.
    """
    tokens = mask_BT.sum()
    if group is not None:
        dist.all_reduce(tokens, group=group)
    if not tokens:
        return {}
    metrics = mismatch_metrics(trainer_BT, rollout_BT, mask_BT, group=group or LOCAL)
    alarms = check_alarms(metrics)
    if group is None or dist.get_rank(group) == 0:
        announce(alarms)
    logged = {f"{NAME}/{name}": metrics[name] for name in LOGGED}
    return {**logged, f"{NAME}/alarms": len(alarms)}
