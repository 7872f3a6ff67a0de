"""Puts hooks around SGLang's functions."""

from collections.abc import Callable, Mapping
from typing import Any

from sgl_fp8rl.engine import compat

Hook = Callable[..., Any]
"""Called with SGLang's own function first, then with its arguments."""
_wrapped: set[str] = set()


def wrap(hooks: Mapping[str, Hook]) -> None:
    """Put each hook around a function of ``HOOK_TARGETS``, or of a path, unless one of ours is.

    SGLang's ``register`` and ``apply_hooks`` would leave out a function that another plugin has
    wrapped before, and only log one that they do not find.

    Raises:
        IncompatibleSGLangError: SGLang lacks a function.
    """
    for name, hook in hooks.items():
        target = compat.HOOK_TARGETS.get(name, name)
        if target in _wrapped:
            continue
        try:
            around = [(compat.HookType.AROUND, hook, None)]
            compat.HookRegistry._apply_target(target, around)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise compat.IncompatibleSGLangError(
                f"SGLang {compat.sglang_version()} does not let sgl-fp8rl wrap {target} ({error}); "
                f"install {' or '.join(compat.TESTED_VERSIONS)}"
            ) from error
        _wrapped.add(target)
