"""Snapshots: what changes of them, and the one that follows."""

import torch

from sgl_fp8rl.protocol.snapshot import Change, Snapshot


def change_to(snapshot: Snapshot, chunk: int, content: torch.Tensor) -> Change:
    steps = snapshot.changing(chunk, content)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            change: Change = end.value
            return change


def test_a_snapshot_goes_on_by_changes_and_whole_chunks() -> None:
    chunks = {n: torch.full((4096,), n, dtype=torch.uint8) for n in range(3)}
    kept = Snapshot("first", {n: chunk.clone() for n, chunk in chunks.items()})
    chunks[0][5] = 9
    chunks[1] = torch.arange(5000).to(torch.uint8)  # of another size
    changes = {n: change_to(kept, n, chunk) for n, chunk in chunks.items()}
    assert [changes[n].is_delta for n in range(3)] == [True, False, True]
    before = {n: chunk.clone() for n, chunk in kept._chunks.items()}
    first = kept
    assert all(torch.equal(kept._chunks[n], before[n]) for n in before), "not before the commit"
    kept = first.advance(changes, "second")
    assert (first.name, kept.name) == ("", "second")
    assert not change_to(first, 0, chunks[0]).is_delta, "it has given its chunks away"
    assert all(torch.equal(kept._chunks[n], chunk) for n, chunk in chunks.items())


def test_a_snapshot_holds_what_its_update_brought() -> None:
    """A chunk that another rank sent this time must not be the base of a later delta here."""
    first = {chunk: torch.full((64,), chunk, dtype=torch.uint8) for chunk in range(2)}
    snapshot = Snapshot("1", {}).advance(
        {c: Change(v, is_delta=False) for c, v in first.items()}, "1"
    )
    change = change_to(snapshot, 0, torch.full((64,), 9, dtype=torch.uint8))
    later = snapshot.advance({0: change}, "2")
    assert not change_to(later, 1, first[1]).is_delta, "whole, since nothing is known of it"
    assert change_to(later, 0, torch.full((64,), 9, dtype=torch.uint8)).is_delta
