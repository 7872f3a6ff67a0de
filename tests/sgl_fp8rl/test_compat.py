"""What we write into SGLang is in ``engine/``, is named in ``compat``, and is there in SGLang."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sgl_fp8rl
from sgl_fp8rl import compat
from tests.test_imports import layer_of, module_of

HOME = Path(str(sgl_fp8rl.__file__)).parent
ENGINE = range(layer_of("sgl_fp8rl.compat"), layer_of("sgl_fp8rl.engine.plugin") + 1)
"""The layers that know SGLang."""


def trees() -> dict[Path, ast.Module]:
    """The code of these layers."""
    return {
        path: ast.parse(path.read_text())
        for path in HOME.rglob("*.py")
        if layer_of(module_of(path.relative_to(HOME.parent))) in ENGINE
    }


def written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Each attribute that is assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def fields_of_ours(tree: ast.AST) -> set[str]:
    """Attributes of our own classes."""
    fields = {node.attr for node in written(tree) if is_of_self(node)}
    for definition in ast.walk(tree):
        if isinstance(definition, ast.ClassDef):
            declared = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
            fields |= {ast.unparse(node.target) for node in declared}
    return fields


def foreign(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.Attribute]]:
    """Each attribute that is set on an object of none of our classes."""
    ours = set().union(*map(fields_of_ours, trees.values()))
    for path, tree in trees.items():
        for node in written(tree):
            if not is_of_self(node) and node.attr not in ours:
                yield path, node


def unnamed(trees: dict[Path, ast.Module]) -> set[str]:
    """What is set in SGLang and not named in ``compat``."""
    named = {name for names in compat.ATTRIBUTES.values() for name in names}
    named |= {path.rpartition(".")[2] for path in compat.METHODS}
    return {
        ast.unparse(node)
        for _, node in foreign(trees)
        if node.attr not in named and not node.attr.removeprefix("_").startswith("fp8rl")
    }


def elsewhere(trees: dict[Path, ast.Module]) -> set[str]:
    """What is set in SGLang outside of ``engine/``: by name, by ``setattr``, or as a hook."""
    outside = {path: tree for path, tree in trees.items() if path.parent != HOME / "engine"}
    calls = {
        ast.unparse(node.func)
        for tree in outside.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and re.search(r"(setattr|delattr|HookRegistry\.\w+)$", ast.unparse(node.func))
    }
    both = {path: tree for path, tree in foreign(trees) if path in outside}
    return calls | {ast.unparse(node) for node in both.values()}


def test_what_is_written_into_sglang_is_named() -> None:
    assert unnamed(trees()) == set()


def test_sglang_is_written_into_in_one_folder() -> None:
    assert elsewhere(trees()) == set()


HOOK = "def hook(original, scheduler):\n    scheduler.{}, x = [], 0"


@pytest.mark.parametrize(
    ("folder", "code", "new", "out_of_place"),
    [
        ("engine", HOOK.format("new_queue"), {"scheduler.new_queue"}, set()),
        ("engine", HOOK.format("waiting_queue"), set(), set()),
        ("kv_cache", HOOK.format("waiting_queue"), set(), {"scheduler.waiting_queue"}),
        ("kv_cache", "setattr(layer, name, 1)", set(), {"setattr"}),
        ("gemm", "compat.HookRegistry.register(a, b)", set(), {"compat.HookRegistry.register"}),
    ],
)
def test_a_planted_write_is_found(
    folder: str, code: str, new: set[str], out_of_place: set[str]
) -> None:
    planted = {**trees(), HOME / folder / "planted.py": ast.parse(code)}
    assert unnamed(planted) == new
    assert elsewhere(planted) == out_of_place


def test_sglang_has_each_attribute() -> None:
    checked = compat.check_attributes()
    assert len(checked) > 40
    assert [path for path, found in checked if not found] == []


def test_an_attribute_that_is_gone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        in_body: int

        def method(self) -> Any:
            return self.in_method  # type: ignore[attr-defined]

    class Derived(Base):
        pass

    module = SimpleNamespace(Derived=Derived)
    monkeypatch.setattr(compat.importlib, "import_module", lambda _: module)
    names = ("in_body", "method", "in_method", "gone")
    monkeypatch.setattr(compat, "ATTRIBUTES", {"sglang.a.Derived": names, "sglang.a.Gone": names})
    found = [path for path, is_found in compat.check_attributes() if is_found]
    assert found == [f"sglang.a.Derived.{name}" for name in names[:3]]
