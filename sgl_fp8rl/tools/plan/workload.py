"""What a rollout is asked for: prompts, and how long their answers get."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

SEED = 0


class WorkloadError(ValueError):
    """A workload that cannot be read."""


@dataclass(frozen=True)
class Request:
    """One sample of a rollout, in tokens."""

    prompt: int
    response: int
    limit: int
    """Its ``max_new_tokens``, by which SGLang decides how many it starts."""


@dataclass(frozen=True)
class Workload:
    """All samples of one rollout."""

    requests: Sequence[Request]

    @property
    def response_tokens(self) -> int:
        return sum(request.response for request in self.requests)

    @property
    def mean_context(self) -> int:
        """Tokens that a sequence has in the middle of its answer."""
        return round(fmean(each.prompt + each.response / 2 for each in self.requests))


def lognormal(count: int, prompt: int, median: int, sigma: float, limit: int) -> Workload:
    """Answers of lognormal lengths, cut at ``limit``."""
    rng = random.Random(SEED)
    drawn = (round(rng.lognormvariate(math.log(median), sigma)) for _ in range(count))
    requests = [Request(prompt, min(limit, max(1, length)), limit) for length in drawn]
    return Workload(requests)


def logged(path: Path, limit: int | None) -> Workload:
    """The samples of a run: lines of ``{"prompt_tokens": int, "response_tokens": int}``.

    Args:
        limit: ``max_new_tokens``; None for the longest answer.

    Raises:
        WorkloadError: a line says something else, or an answer is longer than the limit.
    """
    samples: list[tuple[int, int]] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found: Any = json.loads(line)
            tokens = [found["prompt_tokens"], found["response_tokens"]]
        except (ValueError, KeyError, TypeError):
            tokens = []
        if len(tokens) != 2 or any(type(each) is not int or each < 1 for each in tokens):
            raise WorkloadError(
                f'line {number} of {path} is not {{"prompt_tokens": N, "response_tokens": N}}'
            )
        samples.append((tokens[0], tokens[1]))
    if not samples:
        raise WorkloadError(f"{path} has no samples")
    longest = max(response for _, response in samples)
    if limit is not None and limit < longest:
        raise WorkloadError(
            f"{path} has an answer of {longest} tokens; give --max-response-tokens at least that"
        )
    return Workload([Request(*each, longest if limit is None else limit) for each in samples])
