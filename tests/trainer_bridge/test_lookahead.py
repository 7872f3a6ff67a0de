"""Work that is some steps ahead of its results."""

from sgl_fp8rl.protocol.image import Steps
from trainer_bridge.ways.chunks import Lookahead


def test_results_come_in_order_and_as_soon_as_they_are_there() -> None:
    done: list[str] = []

    def work(name: str, waits: int) -> Steps[str]:
        for step in range(waits):
            done.append(f"{name}{step}")
            yield
        return name

    ahead = Lookahead[str]()
    assert list(ahead.push(work("a", 2))) == []
    assert list(ahead.push(work("b", 0))) == [], "a comes first"
    assert list(ahead.push(work("c", 2))) == ["a", "b"]
    assert done == ["a0", "a1", "c0"]
    assert list(ahead.push(work("d", 1))) == []
    assert done[3:] == ["d0", "c1"], "what can be queued is, before anything is waited for"
    assert list(ahead.drain()) == ["c", "d"]
    assert list(ahead.drain()) == []
