"""The names of our metrics in other frameworks, as the table of docs/correction.md has them."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "correction.md"
FIRST = "| here | verl | slime | NeMo-RL | prime-rl | TRL |"


def _names() -> dict[str, dict[str, str]]:
    """Ours, then framework -> theirs; <option> is a rejection such as seq_mean_k3."""
    lines = DOCS.read_text().splitlines()
    begin = len(lines) - lines[::-1].index(FIRST) - 1
    rows = []
    for line in lines[begin:]:
        if not line:
            break
        rows.append([cell.strip().strip("`") for cell in line.split("|")[1:-1]])
    (_, *frameworks), _, *metrics = rows
    return {
        ours: {name: cell for name, cell in zip(frameworks, theirs, strict=True) if cell}
        for ours, *theirs in metrics
    }


NAMES = _names()
