"""What we write into SGLang is in ``engine/``; what we use of it is in ``compat``, and is there."""

import ast
import asyncio
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request

from sgl_fp8rl.engine import compat
from tests.sgl_fp8rl.sglang_uses import Use, Uses, fields_of, is_ours
from tests.test_imports import PACKAGES, ROOT

ENGINE = "sgl_fp8rl/engine/"
"""What it reads of SGLang's objects is named in ``compat``."""
COMPAT = f"{ENGINE}compat/"
"""Looks it up."""
NOT_SGLANG = {
    # transformers' modules; tests/test_imports.py shows that no SGLang is loaded
    "sgl_fp8rl/tools/precision/": r"(module|decoder|head)\..*",
    # the training frameworks' own objects
    "trainer_bridge/adapters/slime.py": r"actor\.UpdateWeightFromDistributed",
    "trainer_bridge/adapters/trl.py": r"(self\._)?trainer\..*|kept\[name\]\.append",
    "sgl_fp8rl/verl/": r"(object\.__setattr__\()?config\b.*|output\..*|fields\[.*",
    # torch's, and modules of transformers
    "trainer_bridge/sources/adapters.py": r"plain\.config",
    "trainer_bridge/fp8/engine_norms.py": r"norm\.__class__",
    "trainer_bridge/kv/fp8_attention.py": r"ctx\.scale|setattr\(module, .*FAKE_QUANTIZED, kv\)",
    "trainer_bridge/fp8/fp8_layers.py": r"(ctx|module)\..*|super\(\)\.__setattr__\(name, value\)",
    "trainer_bridge/fp8/fp8_weights.py": r"local\.fsdp_.*|out\.codes",
    # the import system's
    "sgl_fp8rl/after_import.py": r"spec\.loader\.exec_module",
}
"""Writes outside of ``engine/`` into what the test cannot tell from SGLang's, by file or folder."""
COMPUTED = {
    "setattr(server_args, name, value)",  # the names are two lines above, and in ATTRIBUTES
    "setattr(sent, name, None)",  # the names are OPAQUE, in ATTRIBUTES
    "delattr(layer, name)",  # all parameters of a layer, which are then made anew
}
"""Writes in ``engine/`` whose name the code computes."""
OF_OURS = {"is_compiled", "kernel", "keep_bf16", "making_pools", "power_of_two_scales"}
"""Read through SGLang's objects: of our methods, which its layers hold, and of our platform."""
NAMESPACES = {"comm", "deterministic", "moe"}
"""SGLang groups its arguments by these as it starts; ATTRIBUTES has their fields, ServerArgs'."""
GENERAL = {"architectures", "fn", "format_ue8m0", "func", "scope", "value"}.union(
    *map(dir, (torch.Tensor, torch.nn.Module, dict, list, str, FunctionType, compat)),
    *map(dir, (asyncio.BaseEventLoop, asyncio.Lock, FastAPI, Request)),
)
"""Not SGLang's names, though its objects may have them: of torch, Python and transformers."""


@cache
def trees() -> dict[str, ast.Module]:
    """The code of the three packages, by path."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


@cache
def fields() -> set[str]:
    """Attributes of all classes of the three packages."""
    return set().union(*map(fields_of, trees().values()))


def uses_of(trees: Mapping[str, ast.Module]) -> dict[str, Uses]:
    return {path: Uses(tree, fields()) for path, tree in trees.items()}


def named() -> set[str]:
    """All names in ``compat``."""
    tables = (compat.ATTRIBUTES, compat.NEWER_ATTRIBUTES)
    names = {name for table in tables for names in table.values() for name in names.split()}
    paths = [*compat.METHODS, *compat.HOOK_TARGETS.values()]
    return names.union(compat.SYMBOLS, (path.rpartition(".")[2] for path in paths))


def unnamed(uses: Mapping[str, Uses]) -> set[str]:
    """What is written into SGLang's objects, or read of them, and not named in ``compat``."""
    known, general = named(), GENERAL | OF_OURS | NAMESPACES

    def is_new(use: Use) -> bool:
        return use.name not in known and not is_ours(use.name)

    found = set()
    for path, each in uses.items():
        if path.startswith(ENGINE):
            found |= {u.code for u in each.writes if is_new(u) and u.code not in COMPUTED}
            reads = [u for u in each.reads if is_new(u) and u.name and u.name not in general]
            found |= {u.code for u in reads if not path.startswith(COMPAT)}
    return found


def elsewhere(uses: Mapping[str, Uses]) -> set[str]:
    """What is written into SGLang's objects outside of ``engine/``."""
    return {
        use.code
        for path, each in uses.items()
        for use in each.writes
        if not path.startswith(ENGINE)
        and not any(
            path.startswith(place) and re.fullmatch(code, use.code)
            for place, code in NOT_SGLANG.items()
        )
    }


def test_what_is_used_of_sglang_is_named_and_written_into_in_one_folder() -> None:
    """And each exception is needed."""
    uses = uses_of(trees())
    assert unnamed(uses) == set()
    assert elsewhere(uses) == set()
    writes = {(path, use.code) for path, each in uses.items() for use in each.writes}
    for place, code in NOT_SGLANG.items():
        assert any(path.startswith(place) and re.fullmatch(code, found) for path, found in writes)
    assert {code for _, code in writes} >= COMPUTED
    names = {use.name for each in uses.values() for use in each.reads}
    assert names >= OF_OURS | NAMESPACES


HOOK = "def hook(original: Any, scheduler: Any, *args: Any) -> Any:\n    "
WRITES = {
    "scheduler.new_queue, x = [], 0": "scheduler.new_queue",
    "scheduler.waiting.new_queue += [1]": "scheduler.waiting.new_queue",
    "del scheduler.new_queue": "scheduler.new_queue",
    # also a name that one of our classes has
    "scheduler.connection = 1": "scheduler.connection",
    "each = scheduler.all()[0]; each.connection = 1": "each.connection",
    "for each in list(scheduler.all()): each.connection = 1": "each.connection",
    "(each,) = [original(scheduler)]; self.scheduler.new_queue = 1": "self.scheduler.new_queue",
    "scheduler.new_queue[0] = 1": "scheduler.new_queue[0]",
    "del scheduler.new_queue[0]": "scheduler.new_queue[0]",
    "compat.NEW_METHODS['fp8rl'] = 1": "compat.NEW_METHODS['fp8rl']",
    "compat.NEW_METHODS.append('fp8rl')": "compat.NEW_METHODS.append",
    "methods = compat.NEW_METHODS; methods.update(x=1)": "methods.update",
    "compat.add_new_choices(['fp8rl'])": "compat.add_new_choices",
    "setattr(scheduler, 'new_queue', 1)": "setattr(scheduler, 'new_queue', 1)",
    "setattr(scheduler, name, 1)": "setattr(scheduler, name, 1)",
    "delattr(scheduler, 'new_queue')": "delattr(scheduler, 'new_queue')",
    "object.__setattr__(scheduler, 'new', 1)": "object.__setattr__(scheduler, 'new', 1)",
    "scheduler.__dict__['new_queue'] = 1": "scheduler.__dict__['new_queue']",
}


@pytest.mark.parametrize("code", WRITES)
@pytest.mark.parametrize("folder", ["sgl_fp8rl/engine", "sgl_fp8rl/receiver", "trainer_bridge"])
def test_a_planted_write_is_found(folder: str, code: str) -> None:
    uses = uses_of({f"{folder}/planted.py": ast.parse(HOOK + code)})
    found = unnamed(uses) if folder == "sgl_fp8rl/engine" else elsewhere(uses)
    assert WRITES[code] in found


def test_a_write_of_a_named_attribute_belongs_into_the_folder() -> None:
    named = ast.parse(HOOK + "scheduler.waiting_queue = []; compat.HookRegistry.register(a, b)")
    assert unnamed(uses_of({f"{ENGINE}planted.py": named})) == set()
    both = {"scheduler.waiting_queue", "compat.HookRegistry.register"}
    assert elsewhere(uses_of({"server_args/planted.py": named})) == both


def test_our_own_objects_are_not_sglangs() -> None:
    for code in (
        "self.queue = []",
        "mine = Session(); mine.queue = []",
        "queue = []; queue.append(scheduler)",
        "scheduler.fp8rl_kv.measuring = True",
        "torch.backends.cudnn.enabled = False",
    ):
        planted = ast.parse(f"import torch\n{HOOK}{code}\nclass Session:\n    measuring: bool")
        assert elsewhere(uses_of({"trainer_bridge/planted.py": planted})) == set()


@pytest.mark.parametrize("folder", ["sgl_fp8rl/engine", "sgl_fp8rl/engine/gemm"])
@pytest.mark.parametrize(
    "code",
    [
        "scheduler._new_private",
        "getattr(scheduler, '_new_private', None)",
        "compat.Engine._new_private",
        "our_function(scheduler)._new_private",
        "self._new_private",
        "original.__globals__['_new_private']",
        "scheduler.new_public",
        "hasattr(scheduler.tp_worker, 'new_public')",
    ],
)
def test_a_planted_read_is_found(folder: str, code: str) -> None:
    planted = ast.parse(HOOK + code)
    assert unnamed(uses_of({f"{folder}/planted.py": planted})) == {code}
    bundle = "class Call(NamedTuple):\n    backend: Any\n"
    held = ast.parse(f"{bundle}def hook(call: Call):\n    call.backend.new_public")
    assert unnamed(uses_of({f"{folder}/planted.py": held})) == {"call.backend.new_public"}
    own = f"class Ours:\n    def _new_private(self):\n        return self._new_private\n{HOOK}pass"
    assert unnamed(uses_of({f"{folder}/planted.py": ast.parse(own)})) == set()


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
