"""FP8 rollouts for TRL's ``GRPOTrainer``: ``attach(trainer, engine)``, or the subclass here.

TRL samples with vLLM through one object, ``trainer.vllm_generation``: ``sync_weights`` once a step
before sampling, then ``generate``. ``EngineGeneration`` takes that place. Importance sampling
(``vllm_importance_sampling_*``) and its metrics (``sampling/*``) stay TRL's; the logs gain
``fp8rl/*``. TRL 1.16 names what is set here; the names are not part of its documented interface.
"""

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge import Rollout, rollout, update
from trainer_bridge.adapters.rollouts import mismatch_log, whole_rollout, without_tokens
from trainer_bridge.adapters.updates import next_version
from trainer_bridge.rollouts.sampling import check_sampling

try:
    import trl
    from accelerate.utils import broadcast_object_list, gather_object
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"trainer_bridge.adapters.trl cannot import TRL ({error}); run pip install 'trl>=1.16'"
    ) from error


def attach(trainer: Any, engine: Any) -> None:
    """Let a ``trl.GRPOTrainer`` sample from an FP8 engine that follows its weights.

    Every rank calls it, before ``train``; rank 0 alone speaks with the engine. Ranks may be of DDP
    or FSDP2. Adapters of PEFT are merged into what is sent, a copy of the adapted matrices; the
    trainer's weights are not touched.

    A completion that failed, was aborted or has a token of another policy is left out of baseline
    and loss; ``fp8rl/failed_completions`` counts them. Where all fail, training ends with an error;
    with tools or a ``rollout_func``, whose requests have no place in the batch, where one does.

    Args:
        trainer: built with ``use_vllm=False``.
        engine: an ``sgl.Engine``, or the ``http://`` address of a server; of rank 0.

    Raises:
        ValueError: the trainer's options cannot work with an engine.
    """
    _check(trainer)
    generation = EngineGeneration(trainer, engine)
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer.vllm_generation, trainer._last_loaded_step = generation, -1
    trainer._generate_and_score_completions = generation.logging(
        trainer._generate_and_score_completions
    )
    trainer._calculate_rewards = generation.without_failed(trainer._calculate_rewards)
    trainer.add_callback(_SyncAtStart(trainer))


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """``trl.GRPOTrainer`` with one more argument, ``engine``; see ``attach``."""

    def __init__(self, *args: Any, engine: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self, engine)


class EngineGeneration:
    """Stands where TRL keeps its vLLM: the methods that ``GRPOTrainer`` calls there."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        is_first = trainer.accelerator.is_main_process
        self.run = f"trl-{secrets.token_hex(4)}" if is_first else None
        """The run of this training; the other ranks follow the first one."""
        self.version = -1
        """The policy version that generates: the trainer's step, unless steps began again."""
        self._trainer, self._engine = trainer, engine
        self._accelerator = trainer.accelerator
        self._group = dist.group.WORLD if trainer.accelerator.num_processes > 1 else None
        self._failed: list[int] = []
        """Of the completions of all ranks, in their order."""

    def sync_weights(self) -> None:
        """Bring the engine to the trainer's weights; TRL calls it once a step."""
        trainer, run = self._trainer, self.run
        version = self.version = next_version(int(trainer.state.global_step), self.version)
        result = update(trainer.model, self._engine, version=version, run=run, group=self._group)
        self._log({f"{NAME}/update_seconds": result.seconds["total"]})

    def generate(
        self,
        prompts: list[list[int]],
        images: None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """One completion to each prompt of this rank, as ``VLLMGeneration.generate`` gives them.

        TRL repeats a prompt ``num_generations`` times, and each is a request of its own.

        Returns:
            prompts, completions, a list with the logprob of each of their tokens, and None.
        """
        gathered = gather_object(prompts)
        box: list[Any] = [None]
        if self._accelerator.is_main_process:
            with profiler or nullcontext():
                box = [self._sample(gathered)]
        broadcast_object_list(box)
        if isinstance(box[0], Exception):
            raise box[0]
        first = self._accelerator.process_index * len(prompts)
        all_tokens, all_logprobs, self._failed = box[0]
        mine = slice(first, first + len(prompts))
        logprobs = [[[logprob] for logprob in row] for row in all_logprobs[mine]]
        return prompts, all_tokens[mine], logprobs, None

    def logging(self, score: Callable[..., Any]) -> Callable[..., Any]:
        """TRL's method that samples and scores a batch; the result also logs it as ``fp8rl/*``."""

        def score_and_log(inputs: Any) -> Any:
            batch = score(inputs)
            self._leave_out(batch)
            counts = {"policy_version": self.version, "failed_completions": len(self._failed)}
            self._log({f"{NAME}/{name}": count for name, count in counts.items()})
            if "sampling_per_token_logps" in batch and "old_per_token_logps" in batch:
                self._log_mismatch(batch)
            return batch

        return score_and_log

    def without_failed(self, calculate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """TRL's method that calculates rewards; a completion that failed has none, and TRL leaves
        it out of the baseline."""

        def calculate_others(*args: Any, **keywords: Any) -> torch.Tensor:
            rewards_BR = calculate(*args, **keywords)  # of all ranks
            rewards_BR[self._failed] = torch.nan
            return rewards_BR

        return calculate_others

    def _leave_out(self, batch: dict[str, torch.Tensor]) -> None:
        """Mask the completions that failed, as TRL does those that are truncated."""
        count = len(batch["completion_mask"])
        first = self._accelerator.process_index * count
        mine = [index - first for index in self._failed if 0 <= index - first < count]
        batch["completion_mask"][mine] = 0
        batch["num_items_in_batch"] = batch["num_items_in_batch"] - len(self._failed)

    def _sample(self, prompts: list[list[int]]) -> Any:
        """Tokens and logprobs of each completion, and which failed: an end token without a logprob
        stands for these. Or why there are none, for all ranks to raise."""
        trainer = self._trainer

        def sample() -> Rollout:
            given = self._engine, prompts, _sampling(trainer)
            if trainer.tools or trainer.rollout_func:
                return whole_rollout(*given, self.version)
            return rollout(*given, expected_version=self.version)

        batch, error = attempt(sample)
        if batch is None:
            return error
        failed = without_tokens(batch)
        for index in failed:
            batch.tokens[index] = trainer.eos_token_ids[:1]
        logprobs: list[Any] = [
            [None] if i in failed else row for i, row in enumerate(batch.logprobs)
        ]
        return batch.tokens, logprobs, failed

    def _log_mismatch(self, batch: dict[str, torch.Tensor]) -> None:
        mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1) > 0
        trainer_BT, rollout_BT = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
        self._log(mismatch_log(trainer_BT, rollout_BT, mask_BT, self._group))

    def _log(self, metrics: dict[str, float]) -> None:
        """Into what TRL averages up to its next log, of training or of evaluation."""
        kept = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        for name, value in metrics.items():
            kept[name].append(value)


class _SyncAtStart(TrainerCallback):  # type: ignore[misc]
    """A training that begins at the step of the last update still begins with an update, and so
    does an evaluation after it, before which the best checkpoint may have been loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._last_loaded_step = -1

    on_train_end = on_train_begin


def _sampling(trainer: Any) -> dict[str, Any]:
    """TRL's sampling options, under SGLang's names."""
    args = trainer.args
    return {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "regex": args.vllm_structured_outputs_regex,
        "max_new_tokens": trainer.max_completion_length,
        "stop_token_ids": trainer.eos_token_ids,
        "no_stop_trim": True,  # the end token belongs to the completion
        **(args.generation_kwargs or {}),
    }


def _check(trainer: Any) -> None:
    """Refuse what would fail later, or train on wrong numbers."""
    if not isinstance(trainer, trl.GRPOTrainer):
        raise ValueError(f"attach: {type(trainer).__name__} is not a trl.GRPOTrainer; pass one")
    private = "_dist _is_vlm _metrics _calculate_rewards _generate_and_score_completions"
    if missing := ", ".join(name for name in private.split() if not hasattr(trainer, name)):
        raise ValueError(f"attach: this TRL has no {missing}; run pip install 'trl==1.16.*'")
    sharding, mode = trainer._dist, trainer.vllm_importance_sampling_mode
    refused = {
        "it samples with vLLM or has an engine; build it with use_vllm=False and attach once": (
            trainer.use_vllm
        ),
        "it trains a vision-language model, and images are not sent; use a text model": (
            trainer._is_vlm
        ),
        "it calls tools on several ranks, which then sample at different times; use one rank": (
            trainer.tools and trainer.accelerator.num_processes > 1
        ),
        "its model is sharded by FSDP1 or DeepSpeed ZeRO-3; use FSDP2 (fsdp_version: 2) or DDP": (
            sharding.fsdp_version == 1 or sharding.is_zero3
        ),
        "its model has quantized weights, and an engine takes BF16, FP16 or FP32; load it so": (
            any(not p.is_floating_point() for p in trainer.model.parameters())
        ),
        f"its loss 'vespo' has no vllm_importance_sampling_mode={mode!r}; use 'token_truncate'": (
            trainer.loss_type == "vespo"
            and trainer.vllm_importance_sampling_correction
            and mode not in ("token_truncate", "token_mask")
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise ValueError(f"attach: this GRPOTrainer is refused: {why}")
    sampling = _sampling(trainer)
    if sampling.get("n", 1) != 1:
        raise ValueError("attach: generation_kwargs has n; set num_generations instead")
    if sampling["temperature"] != trainer.temperature:
        raise ValueError(
            "attach: generation_kwargs has another temperature than the trainer computes with; set "
            "temperature of the GRPOConfig instead"
        )
    check_sampling(sampling)
