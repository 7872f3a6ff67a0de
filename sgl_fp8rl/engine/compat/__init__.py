"""Every symbol of SGLang that we touch, looked up here, and every attribute that our hooks use.

``compat.Fp8Config`` and the like resolve at their first use, so importing this package loads no
SGLang, and are kept until ``forget``. A symbol that an SGLang version moved or dropped ends in one
error that names both.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib.abc import InspectLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from types import CodeType
from typing import Any

from sgl_fp8rl.engine.compat.attributes import (
    ATTRIBUTES,
    IN_SCHEDULER,
    IN_TOKENIZER_MANAGER,
    METHODS,
    NEWER_ATTRIBUTES,
    SAMPLING_FIELDS,
)
from sgl_fp8rl.engine.compat.hook_targets import (
    ATTENTION_BACKENDS,
    DECODED_ATTENTION,
    FLASHINFER_PLANS,
    FROM_SOURCE,
    HARMLESS_UPDATES,
    HOOK_TARGETS,
    LOGITS_CAP,
    NEWER_UPDATES,
    SHARED_EXPERT_GATE,
    STOCK_UPDATES,
    TRITON_LAUNCH,
    UPDATER,
    XGRAMMAR_MASK,
)
from sgl_fp8rl.engine.compat.symbols import SYMBOLS

__all__ = [
    "ATTENTION_BACKENDS",
    "ATTRIBUTES",
    "DECODED_ATTENTION",
    "FLASHINFER_PLANS",
    "HOOK_TARGETS",
    "IN_SCHEDULER",
    "IN_TOKENIZER_MANAGER",
    "LOGITS_CAP",
    "METHODS",
    "NEWER_ATTRIBUTES",
    "SAMPLING_FIELDS",
    "SHARED_EXPERT_GATE",
    "STOCK_UPDATES",
    "SYMBOLS",
    "TRITON_LAUNCH",
    "UPDATER",
]

TESTED_VERSIONS = ("0.5.17", "0.5.23")
"""Passed the tests that need no GPU, and ran ``tests/gpu`` (tests/GPU.md); the extra ``sglang`` in
pyproject.toml installs the last one."""
INSTALL = f"pip install sglang=={TESTED_VERSIONS[-1]}"
"""What to run where SGLang is missing."""


class IncompatibleSGLangError(RuntimeError):
    """The installed SGLang lacks something that sgl-fp8rl stands on."""


def sglang_version() -> str:
    """The installed SGLang's version.

    Raises:
        IncompatibleSGLangError: SGLang is not installed.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise IncompatibleSGLangError(f"SGLang is not installed; run {INSTALL}") from None


def _lacks(what: str, error: Exception) -> IncompatibleSGLangError:
    return IncompatibleSGLangError(
        f"SGLang {sglang_version()} has no {what} ({error}); "
        f"sgl-fp8rl is tested with {' and '.join(TESTED_VERSIONS)}: install one of these"
    )


def _look_up(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return attrgetter(attribute)(importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise _lacks(path.replace(":", "."), error) from error


def __getattr__(name: str) -> Any:
    if name in NEWER_UPDATES.values():
        return _look_up(f"sglang.srt.managers.io_struct:{name}")
    if name not in SYMBOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _look_up(SYMBOLS[name])
    return found


def forget() -> None:
    """Look each symbol up again at its next use: for tests, which change SGLang."""
    for name in SYMBOLS:
        globals().pop(name, None)


def _target_path(target: str) -> str:
    """``package.module.Class.method`` or ``package.module.function``, its module before a colon."""
    parts = target.split(".")
    first_class = next(
        (i for i, part in enumerate(parts) if part.lstrip("_")[0].isupper()), len(parts) - 1
    )
    return ".".join(parts[:first_class]) + ":" + ".".join(parts[first_class:])


def check_symbols() -> list[tuple[str, bool]]:
    """Look up each symbol and hook target: ``(path, found)`` pairs."""
    checked = []
    for path in SYMBOLS.values():
        checked.append((path.replace(":", "."), _found(path)))
    for target in (*HOOK_TARGETS.values(), *STOCK_UPDATES, *METHODS):
        checked.append((target, _has(target)))
    return checked


def stock_updates() -> dict[str, str]:
    """SGLang's own ways to change weights that this version has, as in ``STOCK_UPDATES``."""
    return STOCK_UPDATES | {target: out for target, out in NEWER_UPDATES.items() if _has(target)}


def unknown_updates() -> list[str]:
    """Methods of SGLang's weight updater that this package does not know: they may change weights.

    Raises:
        IncompatibleSGLangError: SGLang has no such class.
    """
    updater = _look_up(_target_path(UPDATER))
    known = {*HOOK_TARGETS.values(), *STOCK_UPDATES, *NEWER_UPDATES}
    return sorted(
        name
        for name, _ in inspect.getmembers(updater, inspect.isfunction)
        if not name.startswith("_")
        and name not in HARMLESS_UPDATES
        and f"{UPDATER}.{name}" not in known
    )


def derived_weight_error(model: Any) -> str | None:
    """Why SGLang itself would not update a model whose graphs are captured; None if it would.

    Something keeps copies of weights that an update in place does not reach.
    """
    find = _look_up(SYMBOLS["derived_weight_cache_error"])
    # 0.5.17 looks at no model
    error: str | None = find(model) if inspect.signature(find).parameters else find()
    return error


def xgrammar_masks_on_cpu() -> bool:
    """Whether SGLang's backend xgrammar, which is imported, names the CPU where it masks logits."""
    return "cpu" in _look_up(_target_path(XGRAMMAR_MASK)).__code__.co_consts


def _has(target: str) -> bool:
    return _found(_target_path(target))


def check_attributes() -> list[tuple[str, bool]]:
    """Look for each attribute in its owner: ``(path, found)`` pairs. FlashInfer is imported."""
    tables = [ATTRIBUTES]
    if _release(sglang_version()) >= _release(TESTED_VERSIONS[-1]):
        tables.append(NEWER_ATTRIBUTES)
    checked = []
    for owner, names in (entry for table in tables for entry in table.items()):
        path = _target_path(owner)
        if owner in FROM_SOURCE:
            known = _names_in_source(path)
        else:
            known = _names_in(_look_up(path)) if _found(path) else set()
        checked += [(f"{owner}.{name}", name in known) for name in names.split()]
    return checked


def check_live(root: Any, paths: Mapping[str, str]) -> None:
    """Check that objects of a started engine have what is read, called and set on them.

    Args:
        paths: owners of ``ATTRIBUTES``, and where in ``root`` an object of each lies.

    Raises:
        IncompatibleSGLangError: one of them is not there, or lacks something.
    """
    for owner, path in paths.items():
        for name in ATTRIBUTES[owner].split():
            whole = f"{path}.{name}".removeprefix(".")
            try:
                attrgetter(whole)(root)
            except AttributeError as error:
                raise _lacks(f"{owner}.{name}", error) from error


def _release(version: str) -> list[int]:
    """``0.5.23rc1`` as numbers, to compare."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _names_in(owner: Any) -> set[str]:
    """What a class has, declares, or names in the code of its methods, or a function in its own;
    layers register their parameters by strings."""
    known, functions = set(dir(owner)), [owner]
    for base in getattr(owner, "__mro__", ()):
        known |= vars(base).keys() | inspect.get_annotations(base).keys()
        # those of properties, too
        functions += [getattr(found, "fget", found) for found in vars(base).values()]
    for function in filter(inspect.isfunction, functions):
        code = inspect.unwrap(function).__code__
        known |= {*code.co_names, *filter(lambda const: isinstance(const, str), code.co_consts)}
    return known


def _names_in_source(path: str) -> set[str]:
    """What the code of a class names, without running it; nothing if there is no such class."""
    module, _, name = path.partition(":")
    try:
        spec = find_spec(module)
    except ImportError:  # of a package that it is in
        return set()
    loader = spec.loader if spec else None
    code = loader.get_code(module) if isinstance(loader, InspectLoader) else None
    classes = [each for each in _nested(code) if each.co_name == name]
    return {used for each in classes for part in (each, *_nested(each)) for used in part.co_names}


def _nested(code: CodeType | None) -> Iterator[CodeType]:
    """The classes and functions in some code, and those in them."""
    for const in code.co_consts if code else ():
        if isinstance(const, CodeType):
            yield const
            yield from _nested(const)


def _found(path: str) -> bool:
    try:
        _look_up(path)
    except IncompatibleSGLangError:
        return False
    return True
