"""The engines of the arms, all used in one way: ours, and SGLang as it is, which has no plugin."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from benchmarks.engines import stock_push
from benchmarks.engines.weights import hf_named
from benchmarks.parity.arms import Arm
from examples.grpo.engine import running_engine
from sgl_fp8rl.protocol.states import ABORT
from trainer_bridge import Rollout, connect, rollout, update


class Engine(Protocol):
    """What a run needs of an engine."""

    handle: Any
    """What ``trainer_bridge`` takes; a stock one it refuses."""

    def formats(self) -> dict[str, str]:
        """How it keeps each layer; empty where that is not known."""

    def update(self, model: PreTrainedModel, version: int, in_flight: str = ABORT) -> float:
        """Bring it to these weights; returns the seconds that it took."""

    def sample(
        self, prompts: list[list[int]], sampling: dict[str, Any], version: int | None
    ) -> Rollout:
        """Sample with ``version``, or with what it has."""


class OurEngine:
    """An ``sglang.Engine`` with our plugin."""

    def __init__(self, engine: Any) -> None:
        self.handle = engine

    def formats(self) -> dict[str, str]:
        layers = connect(self.handle).control({"op": "layers"})["layers"]
        return {layer["name"]: layer["format"] for layer in layers}

    def update(self, model: PreTrainedModel, version: int, in_flight: str = ABORT) -> float:
        result = update(model, self.handle, version=version, in_flight=in_flight)
        return result.seconds["total"]

    def sample(
        self, prompts: list[list[int]], sampling: dict[str, Any], version: int | None
    ) -> Rollout:
        return rollout(self.handle, prompts, sampling, expected_version=version)


class StockEngine:
    """An ``sglang.Engine`` without our plugin, updated by SGLang's own means."""

    def __init__(self, engine: Any) -> None:
        self.handle, self._version = engine, -1

    def formats(self) -> dict[str, str]:
        return {}

    def update(self, model: PreTrainedModel, version: int, in_flight: str = ABORT) -> float:
        started = time.perf_counter()
        named = [(name, tensor.to(torch.bfloat16)) for name, tensor in hf_named(model)]
        stock_push.flush(self.handle)
        with stock_push.session(self.handle):
            for bucket, last in stock_push.buckets(named, stock_push.BUCKET_BYTES):
                stock_push.send(self.handle, bucket, last, f"version {version}")
        self._version = version
        return time.perf_counter() - started

    def sample(
        self, prompts: list[list[int]], sampling: dict[str, Any], version: int | None
    ) -> Rollout:
        options = dict(sampling)
        n = options.pop("n", 1)
        repeated = [prompt for prompt in prompts for _ in range(n)]
        replies = self.handle.generate(
            input_ids=repeated, sampling_params=options, return_logprob=True
        )
        logprobs = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
        return Rollout(
            prompt_tokens=repeated,
            tokens=[[entry[1] for entry in row] for row in logprobs],
            logprobs=[[entry[0] for entry in row] for row in logprobs],
            versions=[[self._version] * len(row) for row in logprobs],
            finish_reasons=[reply["meta_info"]["finish_reason"]["type"] for reply in replies],
            temperature=options["temperature"],
        )


@contextmanager
def running(
    arm: Arm, checkpoint: Path, ignored_layers: str, seed: int, keywords: dict[str, Any]
) -> Iterator[Engine]:
    """An arm's engine, which is shut down at the end.

    Args:
        ignored_layers: which layers ours keeps in BF16.
        keywords: of ``sglang.Engine``.
    """
    if not arm.stock:
        with running_engine(checkpoint, ignored_layers, seed, keywords) as engine:
            yield OurEngine(engine)
        return
    if torch.cuda.is_available():  # a CPU has SGLang's platform from us
        os.environ["SGLANG_PLUGINS"] = "none"
    import sglang

    theirs = {name: value for name, value in keywords.items() if not name.startswith("fp8rl_")}
    engine = sglang.Engine(
        model_path=str(checkpoint),
        skip_tokenizer_init=True,
        random_seed=seed,
        **{"log_level": "error", "dtype": "bfloat16", **theirs},
    )
    try:
        yield StockEngine(engine)
    finally:
        engine.shutdown()
