"""What we use of SGLang is named in ``compat``, and is there."""

import ast
import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from http import HTTPStatus
from ipaddress import IPv4Address
from logging import Logger
from pathlib import Path
from subprocess import Popen
from threading import Event, Thread
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request
from torch import nn

from sgl_fp8rl.engine import compat
from tests.test_imports import PACKAGES, ROOT

ENGINE = ROOT / "sgl_fp8rl" / "engine"
"""What it reads of SGLang's objects, or writes into them, is named in ``compat``."""
READS, WRITES = ("getattr", "hasattr"), ("setattr", "delattr")
COMPUTED = {
    "setattr(server_args, name, value)",  # the names are two lines above, and in ATTRIBUTES
    "setattr(sent, name, None)",  # the names are OPAQUE, in ATTRIBUTES
    "delattr(layer, name)",  # all parameters of a layer, which are then made anew
}
"""Writes whose name the code computes."""
GENERAL = {"architectures", "comm", "fn", "multi_processor_count", "returncode", "scope"}.union(
    ("__self__", "format_ue8m0", "ipv4_mapped", "tie_word_embeddings", "tobytes"),
    *map(dir, (torch, torch.Tensor, torch.cuda, nn, nn.Module, nn.functional, FunctionType)),
    *map(dir, (dict, list, str, set, Path, Counter, Logger, Popen, Event, Thread, Future)),
    *map(dir, (asyncio.BaseEventLoop, asyncio.Task, asyncio.Lock, FastAPI, Request)),
    *map(dir, (HTTPStatus, IPv4Address, os.stat_result, compat)),
)
"""Not SGLang's names, though its objects may have them: of Python, torch and transformers."""


def ours() -> set[str]:
    """Names of our modules, functions and classes, and of what these have."""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        found.update(path.with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                found.add(ast.unparse(node).removeprefix("self."))
    return found


def named() -> set[str]:
    """All names in ``compat``."""
    tables = (compat.ATTRIBUTES, compat.NEWER_ATTRIBUTES)
    names = {name for table in tables for names in table.values() for name in names.split()}
    paths = [*compat.METHODS, *compat.HOOK_TARGETS.values()]
    return names.union(compat.SYMBOLS, (path.rpartition(".")[2] for path in paths))


def uses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Name and code of each attribute that is read or written, but for those of modules."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    modules = {alias.asname or alias.name.partition(".")[0] for n in imports for alias in n.names}
    for node in ast.walk(tree):
        code = ast.unparse(node)
        if isinstance(node, ast.Attribute) and code.partition(".")[0] not in modules:
            yield node.attr, code
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".__globals__"):
            yield str(getattr(node.slice, "value", None)), code
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (*READS, *WRITES):
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) or ast.unparse(node.func) in WRITES:
                yield str(name), code


def unnamed(tree: ast.AST, known: set[str]) -> set[str]:
    return {
        code
        for name, code in uses(tree)
        if name not in known and not name.startswith(("fp8rl", "_fp8rl"))
    }


def test_what_is_used_of_sglang_is_named() -> None:
    """And each exception is needed. ``tests/test_imports.py`` has that only ``engine/`` uses it."""
    known = ours() | named() | GENERAL
    paths = [path for path in ENGINE.rglob("*.py") if "compat" not in path.parts]
    found = set().union(*(unnamed(ast.parse(path.read_text()), known) for path in paths))
    assert found == COMPUTED


@pytest.mark.parametrize(
    "code",
    [
        "scheduler.new_queue",
        "scheduler.new_queue = 1",
        "del scheduler.new_queue",
        "compat.Engine._new_private",
        "our_function(scheduler)._new_private",
        "getattr(scheduler, '_new_private', None)",
        "hasattr(scheduler.tp_worker, 'new_public')",
        "original.__globals__['_new_private']",
        "setattr(scheduler, 'new_queue', 1)",
        "setattr(scheduler, name, 1)",
    ],
)
def test_a_planted_use_is_found(code: str) -> None:
    known = ours() | named() | GENERAL
    assert len(unnamed(ast.parse(f"import torch\n{code}"), known)) == 1
    for other in ("scheduler.waiting_queue = []", "scheduler.fp8rl_kv.measuring", "torch.new.name"):
        assert unnamed(ast.parse(f"import torch\n{other}"), known) == set()


def test_sglang_has_each_symbol_and_hook_target() -> None:
    """Where it lacks one the plugin does not start."""
    assert not [path for path, found in compat.check_symbols() if not found]


def test_sglang_has_each_attribute() -> None:
    checked = compat.check_attributes()
    assert len(checked) > 200
    assert [path for path, found in checked if not found] == []


def test_a_symbol_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(compat, "_look_up", lambda path: found.append(path) or object())
    first = compat.Engine
    assert compat.Engine is first and found == [compat.SYMBOLS["Engine"]]
    compat.forget()
    assert compat.Engine is not first and len(found) == 2


def test_an_attribute_that_is_gone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        in_body: int

        def method(self, layer: Any) -> Any:
            layer.register_parameter("in_string", None)
            return self.in_method  # type: ignore[attr-defined]

    class Derived(Base):
        pass

    module = SimpleNamespace(Derived=Derived)
    monkeypatch.setattr(compat.importlib, "import_module", lambda _: module)
    names = "in_body method in_method in_string gone"
    table = {"sglang.a.Derived": names, "sglang.a.Gone": names}
    monkeypatch.setattr(compat, "ATTRIBUTES", table)
    monkeypatch.setattr(compat, "NEWER_ATTRIBUTES", {})
    found = [path for path, is_found in compat.check_attributes() if is_found]
    assert found == [f"sglang.a.Derived.{name}" for name in names.split()[:-1]]


def test_a_class_that_cannot_be_imported_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_gpu.py").write_text(
        "import no_such_library\n"
        "class Other:\n"
        "    def method(self): return self.gone\n"
        "class Backend:\n"
        "    def method(self, layer):\n"
        "        return [layer.in_loop for _ in self.in_method]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = "method in_loop in_method gone"
    owners = [f"{module}.Backend" for module in ("needs_a_gpu", "no_such_module", "no.such.module")]
    owners.append("needs_a_gpu.Gone")
    monkeypatch.setattr(compat, "ATTRIBUTES", dict.fromkeys(owners, names))
    monkeypatch.setattr(compat, "NEWER_ATTRIBUTES", {})
    assert not any(found for _, found in compat.check_attributes())  # the control
    monkeypatch.setattr(compat, "FROM_SOURCE", owners)
    found = [path for path, is_found in compat.check_attributes() if is_found]
    assert found == [f"{owners[0]}.{name}" for name in names.split()[:-1]]


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("0.5.9", False), ("0.5.17", False), ("0.5.23rc1", True), ("0.6", True)],
)
def test_attributes_of_newer_versions_are_looked_for_there(
    version: str, is_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "ATTRIBUTES", {})
    monkeypatch.setattr(compat, "NEWER_ATTRIBUTES", {"sglang.version.__version__": "gone"})
    monkeypatch.setattr(compat, "sglang_version", lambda: version)
    looked_for = [("sglang.version.__version__.gone", False)]
    assert compat.check_attributes() == (looked_for if is_newer else [])


def test_what_a_started_engine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/engine`` starts engines of both versions, whose objects have all of it."""
    monkeypatch.setattr(compat, "ATTRIBUTES", {"sglang.Pool": "size available_size"})
    paths = {"sglang.Pool": "runner.pool"}
    pool = SimpleNamespace(size=1, available_size=1)
    compat.check_live(SimpleNamespace(runner=SimpleNamespace(pool=pool)), paths)
    del pool.available_size
    for scheduler in (SimpleNamespace(runner=SimpleNamespace(pool=pool)), SimpleNamespace()):
        with pytest.raises(compat.IncompatibleSGLangError, match=r"Pool\.(available_)?size"):
            compat.check_live(scheduler, paths)
