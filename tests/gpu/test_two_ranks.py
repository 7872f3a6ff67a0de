"""Tensor and expert parallel over two ranks, each on a GPU of its own where there are two."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from tests.engine.harness import Server
from tests.gpu.engines import (
    TP,
    TP_FLAGS,
    Answers,
    digests_of,
    sha256,
    start_server,
    storage,
    together,
    update,
)
from tests.gpu.policies import (
    CUT,
    DENSE,
    MOE,
    MOE_CUT,
    Shape,
    codes_and_scales,
    draw,
    reference_digests,
    shared_folder,
    write_checkpoint,
)
from tests.gpu.trainers import Trainer
from trainer_bridge.updates.update import UpdateResult

pytestmark = pytest.mark.gpu

SIZES = [1, 3, 8]


@dataclass(frozen=True)
class Run:
    """A server that was updated to each policy in turn, and what a fresh engine says of the last.

    Policy ``n`` is drawn with seed ``n``.
    """

    held: list[list[dict[str, str]]]
    """SHA-256 of each parameter, by rank, at the start and after each update."""
    wanted: list[list[dict[str, str]]]
    moved: list[int]
    """Parameters of any rank that lay elsewhere after an update."""
    answers: list[Answers]
    results: dict[str, UpdateResult]
    fresh: Answers


CASES = [  # a model, and ranks of expert parallelism
    pytest.param((DENSE, 1), id=f"{DENSE.name}-tp2"),
    pytest.param((MOE, 1), id=f"{MOE.name}-tp2"),
    pytest.param((MOE, TP), id=f"{MOE.name}-ep2"),
    pytest.param((CUT, 1), id=f"{CUT.name}-tp2"),
    pytest.param((MOE_CUT, 1), id=f"{MOE_CUT.name}-tp2"),
]


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    shape: Shape = request.param[0]
    _, ep_size = request.param
    flags = {**TP_FLAGS, "tp_size": TP, "ep_size": ep_size}
    logs = tmp_path_factory.mktemp("logs")
    last = 5
    with shared_folder() as folder:
        first, final = (write_checkpoint(shape, draw(shape, n), folder / str(n)) for n in (0, last))
        with together(
            partial(start_server, logs / "server.log", first, **flags),
            partial(start_server, logs / "fresh.log", final, **flags),
        ) as (server, fresh):
            yield _update(shape, ep_size, server, Answers.of(fresh, SIZES))


def _update(shape: Shape, ep_size: int, server: Server, fresh: Answers) -> Run:
    digests = [digests_of(server)]
    answers = [Answers.of(server, SIZES)]
    trainer = Trainer(shape)
    results: dict[str, UpdateResult] = {}
    last_gpu = torch.device("cuda", torch.cuda.device_count() - 1)
    elsewhere = {name: t.to(last_gpu) for name, t in draw(shape, 4).items()}
    sends = {
        "bucket": lambda: trainer.become(draw(shape, 1)),
        "mapped": lambda: trainer.become(draw(shape, 2)),
        "codes": lambda: codes_and_scales(draw(shape, 3)),
        "elsewhere": lambda: elsewhere,
        "new tensors": lambda: draw(shape, 5),
    }
    for name, tensors in sends.items():
        results[name] = update(server, tensors())
        if name == "elsewhere":
            results["elsewhere, mapped"] = update(server, elsewhere)
        digests.append(digests_of(server))
        answers.append(Answers.of(server, SIZES))
    wanted = [
        [reference_digests(draw(shape, n), rank, TP, ep_size) for rank in range(TP)]
        for n in range(len(digests))
    ]
    moved = [
        sum(storage(now)[name] != spot for name, spot in storage(at_first).items())
        for ranks in digests[1:]
        for at_first, now in zip(digests[0], ranks, strict=True)
    ]
    held = [[sha256(rank) for rank in ranks] for ranks in digests]
    return Run(held, wanted, moved, answers, results, fresh)


@pytest.mark.guarantee("all-or-none", fault="two ranks, every byte compared")
def test_every_byte_of_both_ranks_is_the_reference(run: Run) -> None:
    for version, (held, wanted) in enumerate(zip(run.held, run.wanted, strict=True)):
        assert held == wanted, f"after update {version}"
    assert run.held[0][0] != run.held[0][1]


@pytest.mark.guarantee("in-place", fault="two ranks, every address compared")
def test_nothing_moved(run: Run) -> None:
    assert run.moved == [0] * len(run.moved)


def test_a_fresh_engine_answers_the_same(run: Run) -> None:
    assert run.answers[-1].logprobs == run.fresh.logprobs
    for before in run.answers[:-1]:
        assert before.logprobs != run.fresh.logprobs


def test_what_stays_in_place_is_read_in_place(run: Run) -> None:
    """By the rank on another GPU too, where there are two."""
    mapped = {name for name, result in run.results.items() if result.mapped_bytes > 0}
    assert mapped == {"mapped", "elsewhere, mapped"}
