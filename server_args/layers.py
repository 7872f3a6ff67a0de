"""Patterns of ``ignored_layers``: how they match a layer's name."""

import re

REGEX_PREFIX = "re:"


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches a layer.

    Args:
        pattern: a substring (``layers.1`` also matches ``layers.10``; write ``layers.1.``), or
            ``re:`` and a regular expression to search for anywhere in the name.
        name: the layer's name, such as ``model.layers.3.mlp.down_proj``.

    Returns:
        True if it matches.
    """
    if pattern.startswith(REGEX_PREFIX):
        return re.search(pattern.removeprefix(REGEX_PREFIX), name) is not None
    return pattern in name


def check_pattern(pattern: str) -> str:
    """Return ``pattern`` unchanged.

    Raises:
        ValueError: it is empty, contains a space or a comma, or is not a valid regex.
    """
    if not pattern or pattern == REGEX_PREFIX:
        raise ValueError("is empty and would match every layer; remove it")
    if re.search(r"\s", pattern):
        raise ValueError(
            rf"{pattern!r} contains a space, which separates patterns; write \s instead"
        )
    if pattern.startswith(REGEX_PREFIX):
        try:
            re.compile(pattern.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None
    elif "," in pattern:
        raise ValueError(f"{pattern!r} contains a comma; separate patterns with spaces")
    return pattern
