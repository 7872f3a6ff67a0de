"""A rollout token by token: SGLang's rules again, written apart from those of the plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Told:
    """What happened."""

    steps: int = 0
    retractions: int = 0
    prefills: list[list[int]] = field(default_factory=list)
    """Tokens of each prompt of a prefill."""
    ms: float = 0.0


def run(
    requests: Sequence[tuple[int, int, int]],
    capacity: int,
    chunk: int,
    step_ms: Callable[[int, int], float],
    prefill_ms: Callable[[list[int]], float],
    most_running: int = 4096,
) -> Told:
    """Serve all of them.

    Args:
        requests: tokens of the prompt, of the response, and what it may have at most.
        step_ms: of so many sequences that hold so many tokens after the step.
    """
    told = Told()
    queue = [[p, r, 0, m] for p, r, m in requests]
    active: list[list[int]] = []
    ratio, blocked = 0.7, False
    while queue or active:
        while queue and not blocked:
            reserve = sum(min(max(m - d, 0), 4096) for _, _, d, m in active)
            free = capacity - sum(p + d for p, _, d, _ in active) - int(ratio * reserve)
            chosen: list[list[int]] = []
            while queue and sum(p + d for p, _, d, _ in chosen) < chunk:
                p, _, d, m = queue[0]
                if len(active) + len(chosen) >= most_running:
                    blocked = True
                    break
                wants = p + d + min(max(m - d, 0), 4096)
                if wants >= free and (active or chosen or p + d >= free):
                    blocked = True
                    break
                free -= wants
                chosen.append(queue.pop(0))
            if not chosen:
                break
            sizes = [p + d for p, _, d, _ in chosen]
            told.prefills.append(sizes)
            told.ms += prefill_ms(sizes)
            active += chosen
            for each in chosen:
                each[2] += 1
            over = [each for each in active if each[2] >= each[1]]
            if over:
                blocked = False
                active = [each for each in active if each[2] < each[1]]
        if not active:
            continue
        while sum(p + d for p, _, d, _ in active) + len(active) > capacity:
            # as SGLang sorts: of equal ones the last goes
            active.sort(key=lambda each: (each[2], -each[0]), reverse=True)
            queue.append(active.pop())
            told.retractions += 1
            blocked = False
            ratio = (sum(each[2] for each in active) + 20 * len(active)) / (
                sum(each[3] for each in active) + 1
            )
            ratio = min(ratio, 1)
        for each in active:
            each[2] += 1
        told.steps += 1
        told.ms += step_ms(len(active), sum(p + d for p, _, d, _ in active))
        ratio = max(ratio - (0.7 - 0.7 * 0.14) / 600, 0.7 * 0.14)
        if any(d >= r for _, r, d, _ in active):
            blocked = False
            active = [each for each in active if each[2] < each[1]]
    return told
