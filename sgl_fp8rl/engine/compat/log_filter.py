"""Lines of SGLang's log that are untrue of an fp8rl engine, and are not written for one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_line(function: Any, part: str) -> Iterator[None]:
    """Meanwhile, drop each line with ``part`` that SGLang's ``function`` would log."""

    def is_true(record: logging.LogRecord) -> bool:
        return part not in record.getMessage()

    theirs = logging.getLogger(function.__module__)
    theirs.addFilter(is_true)
    try:
        yield
    finally:
        theirs.removeFilter(is_true)
