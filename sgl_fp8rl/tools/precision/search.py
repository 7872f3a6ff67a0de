"""Rank layers by the damage of FP8 for their bytes, and find the ignore list of a KL budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sgl_fp8rl.tools.precision.divergence import Divergence
from sgl_fp8rl.tools.precision.groups import Group


@dataclass(frozen=True)
class Damage:
    """The effect on logprobs of FP8 in one layer alone."""

    group: Group
    divergence: Divergence


@dataclass(frozen=True)
class Point:
    """The model with the first layers of the ranking in BF16."""

    ignored: int
    """How many layers, from the top of the ranking."""
    divergence: Divergence
    """Measured, with all other layers in FP8."""
    predicted_kl: float
    """The sum of their KLs alone."""


Measure = Callable[[Sequence[Group]], Divergence]
"""Divergence of the model with these groups in FP8."""


def rank(groups: Iterable[Group], measure: Measure) -> list[Damage]:
    """All groups, those first whose damage is largest for what they cost in BF16."""
    found = [Damage(group, measure([group])) for group in groups]
    return sorted(found, key=lambda damage: -damage.divergence.kl / damage.group.bf16_bytes)


def point(ranked: Sequence[Damage], ignored: int, measure: Measure) -> Point:
    """Measure the model with the first ``ignored`` of the ranking in BF16."""
    rest = ranked[ignored:]
    together = measure([damage.group for damage in rest]) if rest else Divergence(0.0, 0.0)
    return Point(ignored, together, sum(damage.divergence.kl for damage in rest))


def shortest(
    ranked: Sequence[Damage], none_ignored: Point, budget_kl: float, measure: Measure
) -> list[Point]:
    """Bisect for how many layers to keep in BF16, so that the others stay within the budget.

    Each length is measured: damages of single layers add up only approximately. The search assumes
    that the KL falls with the length; if it does not, the list is not the shortest, but it is
    within the budget.

    Args:
        none_ignored: the point of length 0.

    Returns:
        The measured points, ``none_ignored`` first and the answer last. With all layers in BF16 the
        KL is 0, so there is always an answer.
    """
    points = [none_ignored]
    if none_ignored.divergence.kl <= budget_kl:
        return points
    beyond, best = 0, Point(len(ranked), Divergence(0.0, 0.0), 0.0)
    while best.ignored - beyond > 1:
        tried = point(ranked, (beyond + best.ignored) // 2, measure)
        points.append(tried)
        if tried.divergence.kl <= budget_kl:
            best = tried
        else:
            beyond = tried.ignored
    return [tried for tried in points if tried != best] + [best]
