"""How a pattern of ``ignored_layers`` names a layer."""

import re

REGEX_PREFIX = "re:"


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` names the layer ``name``, such as ``model.layers.3.mlp.down_proj``.

    A plain pattern matches as a substring (``layers.1`` also matches ``layers.10``; write
    ``layers.1.``); a pattern that starts with ``re:`` is a regular expression searched for
    anywhere in the name.
    """
    if pattern.startswith(REGEX_PREFIX):
        return re.search(pattern.removeprefix(REGEX_PREFIX), name) is not None
    return pattern in name


def check_pattern(pattern: str) -> str:
    """Return ``pattern`` unchanged.

    Raises:
        ValueError: it is empty, holds a space, separates names by commas, or is no valid regex.
    """
    if not pattern or pattern == REGEX_PREFIX:
        raise ValueError("is empty and would match every layer; remove it")
    if re.search(r"\s", pattern):
        raise ValueError(rf"{pattern!r} holds a space; patterns are separated by spaces, write \s")
    if pattern.startswith(REGEX_PREFIX):
        try:
            re.compile(pattern.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise ValueError(f"{pattern!r} is no valid regular expression: {error}") from None
    elif "," in pattern:
        raise ValueError(f"{pattern!r} holds a comma; separate patterns by spaces")
    return pattern
