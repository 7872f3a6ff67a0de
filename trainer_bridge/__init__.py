"""The trainer side of sgl-fp8rl: three calls for any torch trainer; SGLang is never imported.

>>> trainer_bridge.update(model, engine, version=step)
>>> rollout = trainer_bridge.rollout(engine, prompts, sampling)
>>> correction = trainer_bridge.correct(rollout, trainer_logprobs)

The trainer's logprobs, from a causal LM of transformers:

>>> trainer_logprobs = trainer_bridge.response_logprobs(model, rollout)

For an FP8 KV cache, scales that follow the policy:

>>> calibrator = trainer_bridge.KVCalibrator.of(model)
>>> with calibrator.watch(model):
...     logits = model(tokens).logits
>>> trainer_bridge.update(model, engine, version=step, kv_scales=calibrator.scales())

For an MoE model, the experts that the engine chose:

>>> rollout = trainer_bridge.rollout(engine, prompts, sampling, routed_experts=True)
>>> with trainer_bridge.replay_routing(model, rollout.routed_experts, attention_mask=mask_BS):
...     logits = model(tokens_BS, attention_mask=mask_BS).logits

To compute the forward with the very FP8 codes that the engine serves:

>>> fp8 = trainer_bridge.fp8_forward(model, like=engine)
>>> trainer_bridge.update(model, engine, version=step)
>>> fp8.check(engine)
"""

from typing import Any

from trainer_bridge.correction import (
    PRESETS,
    CorrectionConfig,
    correct,
    group_advantages,
    policy_loss,
    reduce_tokens,
    reference_kl,
)
from trainer_bridge.correction import Correction as Correction
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.engines.engine_client import connect as connect
from trainer_bridge.fp8.fp8_forward import FP8Forward as FP8Forward
from trainer_bridge.fp8.fp8_forward import fp8_forward
from trainer_bridge.kv.kv_calibrator import KVCalibrator
from trainer_bridge.metrics import Alarm as Alarm
from trainer_bridge.metrics import check_alarms, mismatch_metrics
from trainer_bridge.rollouts.batch import Rollout as Rollout
from trainer_bridge.rollouts.logprobs import response_logprobs
from trainer_bridge.rollouts.rollout import rollout
from trainer_bridge.rollouts.routed_experts import routing_disagreement as routing_disagreement
from trainer_bridge.router_replay import record_routing as record_routing
from trainer_bridge.router_replay import replay_routing
from trainer_bridge.session.kept import KEPT
from trainer_bridge.updates.update import UpdateResult as UpdateResult
from trainer_bridge.updates.update import update


def close(engine: Any) -> None:
    """Disconnect from an engine: it unmaps this process's GPU memory, which can then be reused.

    This happens automatically at exit. A later ``update`` connects again. Codes of shards that
    no engine has open any more are freed. The trainer's other ranks, which have no engine, free
    theirs at the next update; or they call ``close(None)`` once the first rank's call has
    returned.

    Args:
        engine: as for ``update``; nothing happens if it was never updated.

    Raises:
        EngineError: it is a string, but not an address.
    """
    KEPT.close(engine)


# What a loop calls. The other names are types and closer looks, whose modules have their own pages.
__all__ = [
    "PRESETS",
    "CorrectionConfig",
    "EngineError",
    "KVCalibrator",
    "check_alarms",
    "close",
    "correct",
    "fp8_forward",
    "group_advantages",
    "mismatch_metrics",
    "policy_loss",
    "reduce_tokens",
    "reference_kl",
    "replay_routing",
    "response_logprobs",
    "rollout",
    "update",
]
