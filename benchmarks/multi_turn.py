"""Conversations of several turns: each goes on, with a tool's output behind its answer, by itself.

As an agent's rollout: the prefix cache holds what earlier turns computed, so a turn prefills the
tool's output, after a prompt that only grows.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import measuring, rollout
from benchmarks.benchmark import LAYERS, Benchmark, Measurement, Option, Run
from benchmarks.engines import models, serving, stock_push

PROMPT, ANSWER, TOOL = 1024, 512, 2048
"""Tokens of a first prompt, of each answer, and of the tool's output behind it."""
TURNS = 4
LONGEST = PROMPT + (TURNS - 1) * (ANSWER + TOOL)
"""Tokens of the last turn's prompt."""


def measure(arm: rollout.Arm, run: Run) -> list[Measurement]:
    """Time of all conversations, and what of their prompts came from the prefix cache."""
    arm.assert_served()
    shape = models.written(models.MODELS[arm.model], run.folder, run.options["layers"])
    count = run.options["conversations"]
    keywords = arm.keywords(largest=count)
    copy_tb_s = measuring.copy_tb_s()
    engine = serving.start(str(run.folder), keywords)
    serving.give_weights(engine, shape, keywords)
    serving.warm_up(engine, serving.Load(count, LONGEST, 1), 0, shape, keywords)
    values: dict[str, list[float]] = {
        name: [] for name in ("rollout_s", "rollout_tokens_s", "prompt_tokens", "cached_share")
    }
    for seed in range(1, run.options["rollouts"] + 1):
        stock_push.flush(engine)
        work = rollout_of(engine, conversations(seed, count, shape.vocab))
        started = time.perf_counter()
        metas = engine.loop.run_until_complete(work)
        seconds = time.perf_counter() - started
        prompts = sum(meta["prompt_tokens"] for meta in metas)
        values["rollout_s"].append(seconds)
        values["rollout_tokens_s"].append(count * TURNS * ANSWER / seconds)
        values["prompt_tokens"].append(float(prompts))
        values["cached_share"].append(sum(meta["cached_tokens"] for meta in metas) / prompts)
    values |= {"kv_tokens": [serving.kv_tokens(engine)], "copy_tb_s": [copy_tb_s]}
    engine.shutdown()
    return serving.measurements(arm.name, arm.model, {f"{count} conversations": values})


def conversations(seed: int, count: int, vocab: int) -> list[serving.Prompts]:
    """The first prompt of each conversation, and the tool's outputs that follow its answers."""
    first = serving.prompts_of(seed, count, PROMPT, vocab)
    tools = serving.prompts_of(1000 + seed, count * (TURNS - 1), TOOL, vocab)
    return [[prompt, *tools[i::count]] for i, prompt in enumerate(first)]


async def rollout_of(engine: Any, work: Sequence[serving.Prompts]) -> list[dict[str, Any]]:
    """``meta_info`` of every turn of every conversation; a conversation waits for no other one."""
    found = await asyncio.gather(*(_conversation(engine, given) for given in work))
    return [meta for metas in found for meta in metas]


async def _conversation(engine: Any, given: serving.Prompts) -> list[dict[str, Any]]:
    tokens: list[int] = []
    metas = []
    for more in given:
        tokens += more
        reply = await engine.async_generate(
            input_ids=list(tokens),
            sampling_params={"max_new_tokens": ANSWER, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=-1,
        )
        answer = [token for _, token, *_ in reply["meta_info"]["output_token_logprobs"]]
        if len(answer) != ANSWER:
            raise RuntimeError(
                f"the engine answered a request for {ANSWER} tokens with {len(answer)}"
            )
        tokens += answer
        metas.append(reply["meta_info"])
    return metas


BENCHMARK = Benchmark(
    jobs=rollout.jobs("qwen3-8b", rollout.STRONGEST),
    measure=measure,
    limit_s=600.0,
    options=(
        Option("conversations", "of a rollout", default=64),
        Option("rollouts", "of an engine", default=3),
        LAYERS,
    ),
)
