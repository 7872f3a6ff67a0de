"""Parse sizes in bytes."""

import re

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text: str) -> int:
    """``"512MiB"``, ``"1GiB"`` or ``"1048576"`` as a number of bytes.

    Raises:
        ValueError: the text is not an integer with one of these units.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) * UNITS[match[2]]
