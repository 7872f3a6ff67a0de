"""Plain text tables for the command line."""

from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """One line per row, columns two spaces apart and aligned to the right.

    Args:
        rows: cells, the header first; all rows have the same length.
        left: columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
