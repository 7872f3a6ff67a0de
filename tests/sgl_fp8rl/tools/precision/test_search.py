"""The ranking and the ignore list, on damages that are made up."""

from collections.abc import Sequence

import pytest
from torch import nn

from sgl_fp8rl.tools.precision.divergence import Divergence
from sgl_fp8rl.tools.precision.groups import Group
from sgl_fp8rl.tools.precision.search import Damage, Point, point, rank, shortest

ALONE = {f"layer {n}": 2.0**-n for n in (3, 1, 4, 0, 2, 6, 5)}
GROUPS = [Group(name, (nn.Linear(2, 3),)) for name in ALONE]


class Meter:
    """Damages add up, times a factor where there is more than one."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls = 0

    def __call__(self, groups: Sequence[Group]) -> Divergence:
        self.calls += 1
        total = sum(ALONE[group.name] for group in groups)
        return Divergence(total * (self.factor if len(groups) > 1 else 1.0), 0.0)


def ranked(meter: Meter) -> list[Damage]:
    return rank(GROUPS, meter)


def test_ranking() -> None:
    assert [d.group.name for d in ranked(Meter())] == [f"layer {n}" for n in range(7)]


def test_a_larger_layer_must_be_worth_its_bytes() -> None:
    larger = Group("layer 0", (nn.Linear(2, 3), nn.Linear(2, 6)))  # three times as large
    groups = [larger, *(g for g in GROUPS if g.name != larger.name)]
    names = [d.group.name for d in rank(groups, Meter())]
    assert names[:4] == ["layer 1", "layer 0", "layer 2", "layer 3"]


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("budget", [0.0, 2.0**-6, 0.1, 0.4999, 0.5, 1.2, 5.0])
def test_the_list_is_the_shortest_within_the_budget(budget: float, factor: float) -> None:
    meter = Meter(factor)
    found = ranked(meter)
    every = [point(found, ignored, meter) for ignored in range(8)]
    wanted = next(p for p in every if p.divergence.kl <= budget)
    meter.calls = 0
    points = shortest(found, every[0], budget, meter)
    assert points[-1] == wanted and points[0] == every[0]
    assert all(p == every[p.ignored] for p in points) and meter.calls <= 3
    assert len({p.ignored for p in points}) == len(points)


def test_all_ignored_costs_nothing_to_measure() -> None:
    meter = Meter()
    found = ranked(meter)
    meter.calls = 0
    assert point(found, 7, meter) == Point(7, Divergence(0.0, 0.0), 0.0) and meter.calls == 0
