"""What these runs share: options, the environment's line, and the JSONL log."""

import argparse
import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.tables.learning import draw

Row = dict[str, Any]


def parser(about: str | None, log: Path | None = None) -> argparse.ArgumentParser:
    """Make a parser with the option ``--log``, which is required unless it has a default.

    Args:
        about: the module's docstring, whose first line describes the command.
    """
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument(
        "--log",
        type=Path,
        default=log,
        required=log is None,
        help="JSONL file, which is replaced",
    )
    return made


def environment_row(command: str, packages: Iterable[str], **more: Any) -> Row:
    """The first line of a log.

    Args:
        packages: those that ``environment`` does not name.
    """
    versions = {name: version(name) for name in packages}
    return {"kind": "environment", **environment(command), **versions, **more}


def write(log: Path, rows: Iterable[Row]) -> None:
    """Write a log."""
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(
    about: str | None,
    log: Path,
    picture: Path,
    measure: Callable[[], list[Row]],
    table: Callable[[list[Row]], str],
) -> None:
    """Run the command of a study whose arms are compared in a table and a picture."""
    options_of = parser(about, log)
    options_of.add_argument("--picture", type=Path, default=picture)
    options = options_of.parse_args()
    rows = measure()
    write(options.log, rows)
    draw(rows, options.picture)
    print(table(rows))
