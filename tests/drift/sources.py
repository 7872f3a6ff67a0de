"""SGLang's code as text: what a path names, what a class has, how a function is called."""

import ast
import inspect
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Signature
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
OPAQUE = ast.Pass()
"""Stands for a module, and for what another package defines."""
READ = re.compile(r"sglang/(?!multimodal_gen/|test/).*\.py|sglang-[^/]*\.dist-info/METADATA")


@dataclass(frozen=True)
class Found:
    """A definition, and the module that it is in."""

    module: str
    node: Any
    is_member: bool = False


class Shape:
    """How a function is called, or a class made: its parameters, with defaults as text."""

    def __init__(self, node: Any, *, is_member: bool = False) -> None:
        copy: Any = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
        for part in ast.walk(copy):
            if isinstance(part, ast.arg):
                part.annotation = None
        for values in (copy.args.defaults, copy.args.kw_defaults):
            values[:] = [value and ast.Constant(ast.unparse(value)) for value in values]
        scope: dict[str, Any] = {}
        module = ast.fix_missing_locations(ast.Module([copy], []))
        exec(compile(module, "<signature>", "exec"), scope)  # an empty function of constants
        marks = {ast.unparse(each) for each in node.decorator_list} | {type(node).__name__}
        self.kinds = marks & {"staticmethod", "classmethod", "property", "AsyncFunctionDef"}
        self.whole = inspect.signature(scope["f"])
        """As a hook is called."""
        parameters = list(self.whole.parameters.values())
        self.bound = Signature(parameters[is_member and "staticmethod" not in marks :])
        """As a method of an object is."""
        self.texts = [str(p).replace("'", "") for p in parameters]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and (self.kinds, self.whole) == (other.kinds, other.whole)

    def since(self, old: "Shape") -> str:
        """What changed."""
        passed = {p.name: p.kind for p in old.whole.parameters.values()}
        named = self.whole.parameters.values()
        changes = {
            "without": [text for text in old.texts if text not in self.texts],
            "with": [text for text in self.texts if text not in old.texts],
            "passed otherwise:": [p.name for p in named if passed.get(p.name, p.kind) != p.kind],
            "marked": sorted(self.kinds ^ old.kinds),
        }
        said = [f"{how} `{', '.join(texts)}`" for how, texts in changes.items() if texts]
        return ", ".join(said) or f"in another order: `{', '.join(self.texts)}`"

    def serves(self, old: "Shape") -> bool:
        """Whether it takes what the old one took."""
        ways = all(takes(self.whole.bind, *way) for way in old.ways())
        first, count = list(self.whole.parameters), len(next(old.ways())[0])
        return ways and first[:count] == list(old.whole.parameters)[:count]

    def ways(self) -> Iterator[tuple[list[None], dict[str, None]]]:
        """Calls of it: with all arguments, with those that it needs, and by keyword."""
        given = self.whole.parameters.values()
        named = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        alone = [p for p in given if p.kind is p.KEYWORD_ONLY]
        needed = [p.name for p in alone if p.default is p.empty]
        yield [None for _ in named], dict.fromkeys(p.name for p in alone)
        yield [None for p in named if p.default is p.empty], dict.fromkeys(needed)
        yield [None for _ in named[:1]], dict.fromkeys(p.name for p in (*named[1:], *alone))


class Sources:
    """One SGLang.

    Args:
        path: a wheel, or a folder such as ``site-packages``.
        paths: what to look for, as ``module:Class.method``.
        owned: attributes by class, or by the function whose globals they are.
    """

    def __init__(self, path: Path, paths: Iterable[str], owned: Iterable[tuple[str, str]]) -> None:
        if path.is_file():
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if READ.fullmatch(name)]
                self.files = {name: wheel.read(name).decode() for name in names}
        else:
            files = {file.relative_to(path).as_posix(): file for file in path.glob("sglang*/**/*")}
            wanted = {name: file for name, file in files.items() if READ.fullmatch(name)}
            self.files = {name: file.read_text() for name, file in wanted.items()}
        metadata = next((text for name, text in self.files.items() if "METADATA" in name), None)
        if metadata is None:
            raise SystemExit(f"{path} holds no SGLang: name its wheel, or the folder that it is in")
        self.version = re.findall(r"^Version: (.*)", metadata, re.M)[0]
        self.pins = dict(
            re.findall(r"^Requires-Dist: (\w+)(?:\[.*?\])?==([^\s;]+)", metadata, re.M)
        )
        self._names: dict[str, dict[str, ast.AST]] = {}
        owners = dict.fromkeys(owner for owner, _ in owned)
        self.owned = {owner: self._attributes(owner) for owner in owners}
        """What each class has."""
        members = (f"{owner}.{name}" for owner, name in owned)
        self.shapes = {p: self._shape(found) for p in (*paths, *members) if (found := self.find(p))}
        """Of what is there; None of all but functions and classes with fields."""

    def find(self, path: str) -> Found | None:
        """The definition, through imports and bases."""
        module, _, names = path.partition(":")
        first, *rest = names.split(".")
        found = self._in_module(module, first)
        for name in rest:
            nodes = ((each, members(each.node).get(name)) for each in self.classes(found))
            found = next((Found(each.module, node, True) for each, node in nodes if node), None)
        return found

    def classes(self, found: Found | None) -> list[Found]:
        """A class, or that of a global object, and its bases in SGLang."""
        if found and isinstance(value := getattr(found.node, "value", None), ast.Call):
            return self.classes(self.find(f"{found.module}:{ast.unparse(value.func)}"))
        if not found or not isinstance(found.node, ast.ClassDef):
            return []
        bases = [re.split(r"[\[(]", ast.unparse(base))[0] for base in found.node.bases]
        above = (self.classes(self.find(f"{found.module}:{base}")) for base in bases)
        return [found, *(each for classes in above for each in classes)]

    @cached_property
    def definitions(self) -> dict[str, set[str]]:
        """By file, what it defines at any depth, or sets on ``self``."""
        made = r" *(?:(?:async )?def |class |self\.)(\w+)"
        fields = r"(?: {4})?(\w+)(?:: (?!.*,$)| = )"  # what ends with a comma is an argument
        pattern = re.compile(f"^(?:{made}|{fields})", re.M)
        return {
            name: {one or other for one, other in pattern.findall(text)}
            for name, text in self.files.items()
        }

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((f for f in (f"{path}/__init__.py", f"{path}.py") if f in self.files), None)

    def _in_module(self, module: str, name: str, *before: tuple[str, str]) -> Found | None:
        """A name of a module; ``before`` are those whose imports led here."""
        file = self._file(module)
        seen = (*before, (module, name))
        if (module, name) in before:
            return None
        if module not in self._names:
            self._names[module] = dict(bound(ast.parse(self.files[file]).body)) if file else {}
        names = self._names[module]
        node = names.get(name)
        if isinstance(node, ast.ImportFrom):
            source = self._source(module, node)
            original = next(a.name for a in node.names if name == (a.asname or a.name))
            if not self._file(source):
                return Found(module, OPAQUE)
            return self._in_module(source, original, *seen)
        if node is not None:
            return Found(module, node)
        if self._file(f"{module}.{name}"):
            return Found(f"{module}.{name}", OPAQUE)
        stars = (self._source(module, node) for key, node in names.items() if key[0] == "*")
        found = (self._in_module(star, name, *seen) for star in stars)
        return next(filter(None, found), None)

    def _source(self, module: str, node: Any) -> str:
        """The module that an import is from."""
        is_package = str(self._file(module)).endswith("/__init__.py")
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package] if node.level else []
        return ".".join([*above, *filter(None, [node.module])])

    def _attributes(self, owner: str) -> set[str]:
        """What a class defines, sets, or registers by a string; the names in a function."""
        found = self.find(owner)
        known: set[str] = set()
        for each in self.classes(found) or filter(None, [found]):
            known |= members(each.node).keys()
            for part in ast.walk(each.node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    known.add(part.attr)
                elif isinstance(part, ast.Call):
                    known |= {str(a.value) for a in part.args if isinstance(a, ast.Constant)}
                elif isinstance(part, ast.Name) and isinstance(each.node, Function):
                    known.add(part.id)
        return known

    def _shape(self, found: Found) -> Shape | None:
        if isinstance(found.node, Function):
            return Shape(found.node, is_member=found.is_member)
        if not isinstance(found.node, ast.ClassDef):
            return None
        has = {n: f for each in self.classes(found)[::-1] for n, f in members(each.node).items()}
        if isinstance(has.get("__init__"), Function):
            return Shape(has["__init__"], is_member=True)
        fields = [
            f"{name}={ast.unparse(node.value)}" if node.value else name
            for name, node in has.items()
            if isinstance(node, ast.AnnAssign)
        ]
        return Shape(ast.parse(f"def f(*, {', '.join(fields)}): ...").body[0]) if fields else None


def takes(bind: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    try:
        bind(*args, **keywords)
    except TypeError:
        return False
    return True


def members(node: ast.AST) -> dict[str, ast.AST]:
    return dict(bound(getattr(node, "body", ())))


def bound(body: Iterable[Any]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements bind, the first definition of one last."""
    for node in reversed(list(body)):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import):
            yield from (((a.asname or a.name).partition(".")[0], OPAQUE) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            star = f"*{node.level}{node.module}"
            yield from ((star if a.name == "*" else a.asname or a.name, node) for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))
        else:
            # what is imported for types alone may be defined below
            for_types = "TYPE_CHECKING" in ast.unparse(getattr(node, "test", OPAQUE))
            for name in ("finalbody", "handlers", "orelse", *([] if for_types else ["body"])):
                yield from bound(getattr(node, name, ()))
