"""The API reference: public calls document arguments, results and errors, and pdoc renders them."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

import pdoc
import pytest

import server_args
import trainer_bridge
from trainer_bridge import metrics
from trainer_bridge.adapters import contract, rollouts, trl, updates
from trainer_bridge.transport import ray_actor

OF_TRAINER = (trainer_bridge, metrics, ray_actor)
MODULES = (*OF_TRAINER, server_args, contract, rollouts, trl, updates)


def public(module: ModuleType) -> list[str]:
    """Names that a module exports: those that it lists, or its own functions."""
    functions = inspect.getmembers(module, inspect.isfunction)
    own = [name for name, value in functions if value.__module__ == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


NAMES = [(module, name) for module in MODULES for name in public(module)]


def sections(doc: str) -> dict[str, str]:
    """Args, Returns, Yields and Raises of a docstring, with their text."""
    parts = re.split(r"^(Args|Returns|Yields|Raises):$", doc, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def raises(function: Callable[..., Any]) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def faults(function: Callable[..., Any], doc: str) -> list[str]:
    """What the docstring of a function leaves out."""
    if not doc.strip():
        return ["no docstring"]
    found, signature = sections(doc), inspect.signature(function)
    described = re.findall(r"^    (\w+):", found.get("Args", ""), re.MULTILINE)
    missing = [name for name in signature.parameters if name not in {"self", *described}]
    returned = str(signature.return_annotation)
    if "Iterator[" in returned:
        wanted = [] if "Iterator[None]" in returned else ["Yields"]
    else:
        wanted = [] if returned in ("None", str(inspect.Signature.empty)) else ["Returns"]
    wanted += ["Raises"] if raises(function) else []
    return missing + [section for section in wanted if not found.get(section, "").strip()]


def calls_of(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """A function, or the constructor and the public methods of a class, with their docstrings."""
    if not inspect.isclass(value):
        yield name, value, inspect.getdoc(value) or ""
        return
    for method, member in vars(value).items():
        function = getattr(member, "__func__", member)
        if method == "__init__" and inspect.isfunction(function) and not is_dataclass(value):
            docs = (inspect.getdoc(value), inspect.getdoc(function))
            yield name, function, "\n\n".join(filter(None, docs))
        elif not method.startswith("_") and inspect.isfunction(inspect.unwrap(function)):
            yield f"{name}.{method}", getattr(value, method), inspect.getdoc(function) or ""


def defines(module: ModuleType, name: str, value: Any) -> bool:
    """Whether the module assigns this constant itself."""
    return vars(module).get(name) is value and name in getattr(module, "__annotations__", {})


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_names_are_documented(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    if callable(value):
        found = {call: faults(function, doc) for call, function, doc in calls_of(name, value)}
        assert not {call: missing for call, missing in found.items() if missing}
    else:  # pdoc reads the docstring of a constant in the module that defines it
        module = next(m for m in list(sys.modules.values()) if defines(m, name, value))
    shown = pdoc.doc.Module(module).get(name)
    assert shown is not None and shown.docstring.strip()
    if isinstance(shown, pdoc.doc.Class):
        members = [m for m in shown.own_members if not m.name.startswith("_")]
        assert not [member.name for member in members if not member.docstring.strip()]


def test_the_check_finds_what_is_left_out() -> None:
    def call(left: int, right: int) -> int:
        """Add.

        Args:
            left: the first number.
        """
        if left < 0:
            raise ValueError
        return left + right

    assert faults(call, inspect.getdoc(call) or "") == ["right", "Returns", "Raises"]
