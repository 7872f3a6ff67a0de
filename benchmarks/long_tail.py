"""A rollout whose answers have a long tail of lengths, from start to the last token.

Prompts have 256 tokens and answers 1000 in the median, so that a rollout takes about two minutes.
The KV cache of every arm is cut in one proportion, on an H200 to about half, as where a trainer
shares the GPU: such that stock BF16 is asked to hold 1.8 times as much as it can.
"""

import re
from collections.abc import Sequence
from statistics import fmean

from benchmarks import measuring, rollout
from benchmarks.benchmark import LAYERS, Benchmark, Measurement, Option, Run
from benchmarks.engines import models, serving, stock_push
from sgl_fp8rl.tools.plan import schedule

REQUESTS = 1024
PROMPT = 256
MEDIAN, SIGMA, CAP = 1000, 0.8, 5000
"""Of the output lengths, which are lognormal."""
DEMAND = 1.8
"""KV that all requests of a rollout would hold at once, over what the BF16 engine may hold."""
USAGE = re.compile(r"Decode batch.*?#running-req: (\d+),")
INTERVAL = 40
"""Decode steps from one line of the scheduler's log to the next, SGLang's default."""
BEGINS = "the rollout begins"
"""Printed into the process's log, where the scheduler's lines follow."""


def measure(arm: rollout.Arm, run: Run) -> list[Measurement]:
    """Time and retractions of one rollout."""
    arm.assert_served()
    shape = models.written(models.MODELS[arm.model], run.folder, run.options["layers"])
    requests = run.options["requests"]
    copy_tb_s = measuring.copy_tb_s()
    lengths = output_lengths(requests)
    keywords = arm.keywords(largest=requests) | {
        "log_level": "info",
        "decode_log_interval": INTERVAL,
    }
    free = measuring.idle_bytes()
    reference = rollout.REFERENCE.keywords(largest=requests)
    reference_tokens = serving.capacity(reference, shape, free)
    share = pool_share(lengths, reference_tokens)
    if share < 1.0:
        keywords["max_total_tokens"] = int(share * serving.capacity(keywords, shape, free))
    engine = serving.start(str(run.folder), keywords)
    serving.give_weights(engine, shape, keywords)
    load = serving.Load(requests, PROMPT, max(lengths))
    serving.warm_up(engine, load, 0, shape, keywords)
    stock_push.flush(engine)
    print(BEGINS, flush=True)
    prompts = serving.prompts_of(1, requests, PROMPT, shape.vocab)
    metas = []
    seconds = serving.seconds(lambda: metas.extend(serving.generate(engine, prompts, lengths)))
    retractions = [float(meta["num_retractions"]) for meta in metas]
    held = serving.kv_tokens(engine)
    engine.shutdown()
    values = {
        "rollout_s": [seconds],
        "rollout_tokens_s": [sum(lengths) / seconds],
        "retractions": [sum(retractions)],
        "kv_tokens": [held],
        "copy_tb_s": [copy_tb_s],
        "kv_demand": [peak_tokens(lengths) / (share * reference_tokens)],
        **usage(run.log.read_text(errors="replace")),
    }
    return serving.measurements(arm.name, arm.model, {f"rollout of {requests}": values})


def output_lengths(requests: int) -> list[int]:
    """Tokens to generate for each prompt, the same in every process."""
    drawn = schedule.lognormal(requests, PROMPT, MEDIAN, SIGMA, CAP)  # as `plan` expects them
    return [request.response for request in drawn]


def peak_tokens(lengths: Sequence[int]) -> int:
    """Most KV tokens held at a time if all requests started together and none had to wait."""
    longest_first = sorted(lengths, reverse=True)
    return max(count * (PROMPT + length) for count, length in enumerate(longest_first, start=1))


def pool_share(lengths: Sequence[int], capacity: float) -> float:
    """Part of its KV cache that each engine may use, so that the demand is ``DEMAND``.

    Args:
        capacity: tokens that the BF16 engine could hold; if that is too little, the part is 1 and
            the demand is more.
    """
    return min(1.0, peak_tokens(lengths) / DEMAND / capacity)


def usage(log: str) -> dict[str, list[float]]:
    """Requests that ran, in the mean of the scheduler's lines."""
    lines = USAGE.findall(log.partition(BEGINS)[2])
    if not lines:
        raise ValueError("the scheduler's log has no line of a decode; look at SGLang's log level")
    return {"running_requests": [fmean(map(float, lines))]}


BENCHMARK = Benchmark(
    jobs=rollout.jobs("qwen3-8b", rollout.STRONGEST),
    measure=measure,
    limit_s=1800.0,
    options=(Option("requests", "of a rollout", default=REQUESTS), LAYERS),
)
