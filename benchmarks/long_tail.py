"""A rollout whose answers have a long tail of lengths, from start to the last token."""

import re
from statistics import fmean

from benchmarks import measuring, models, serving, stock_push
from benchmarks import rollout_cases as cases

USAGE = re.compile(r"Decode batch.*?#running-req: (\d+),.*? token usage: ([\d.]+)")
INTERVAL = 40
"""Decode steps from one line of the scheduler's log to the next, SGLang's default."""

BEGINS = "the rollout begins"
"""Printed into the process's log, where the scheduler's lines follow."""

Values = dict[str, list[float]]


def run(arm: cases.Arm, shape: models.Shape, folder: str, requests: int) -> dict[str, Values]:
    """Values by case: ``rollout of N``."""
    copy_tb_s = measuring.copy_tb_s()
    lengths = cases.output_lengths(requests)
    keywords = arm.keywords(largest=requests) | {
        "log_level": "info",
        "decode_log_interval": INTERVAL,
    }
    free = measuring.idle_bytes()
    reference = cases.REFERENCE.keywords(largest=requests)
    reference_tokens = serving.capacity(reference, shape, free)
    share = cases.pool_share(lengths, reference_tokens)
    if share < 1.0:
        keywords["max_total_tokens"] = int(share * serving.capacity(keywords, shape, free))
    engine = serving.start(folder, keywords)
    serving.give_weights(engine, shape, keywords)
    load = serving.Load(requests, cases.PROMPT, max(lengths))
    serving.warm_up(engine, load, 0, shape, keywords)
    stock_push.flush(engine)
    print(BEGINS, flush=True)
    prompts = serving.prompts_of(1, requests, cases.PROMPT, shape.vocab)
    metas = []
    seconds = serving.seconds(lambda: metas.extend(serving.generate(engine, prompts, lengths)))
    retractions = [float(meta["num_retractions"]) for meta in metas]
    held = serving.kv_tokens(engine)
    engine.shutdown()
    return {
        f"{cases.ROLLOUT} of {requests}": {
            "rollout_s": [seconds],
            "rollout_tokens_s": [sum(lengths) / seconds],
            "retractions": [sum(retractions)],
            "retracted_requests": [float(sum(count > 0 for count in retractions))],
            "kv_tokens": [held],
            "copy_tb_s": [copy_tb_s],
            "kv_demand": [cases.peak_tokens(lengths) / (share * reference_tokens)],
        }
    }


def usage(log: str) -> Values:
    """Requests that ran and the part of the KV cache in use, at each line of the scheduler.

    Raises:
        ValueError: the log has no such line.
    """
    lines = USAGE.findall(log.partition(BEGINS)[2])
    if not lines:
        raise ValueError("the scheduler's log tells of no decode; look at SGLang's log level")
    return {
        "running_requests": [fmean(float(running) for running, _ in lines)],
        "kv_used": [float(used) for _, used in lines],
    }
