"""Where code writes into objects that may be SGLang's, and which names it reads of them.

Only ``compat`` brings SGLang's symbols, and SGLang's objects come as arguments of type ``Any`` or
``nn.Module``, or in such fields of a class of the same file. What is made of these (attributes,
items, results of calls, locals) counts as SGLang's too. Of other objects, such as ``self.x`` and
the results of our functions, nothing is known: an attribute counts where none of our classes has
one of that name.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.test_imports import PACKAGES

Owner = Literal["sglang", "unknown", "other"]
Scope = dict[str, tuple[Owner, str]]
"""Whose object each name is, and the last name of the expression that it stands for."""

OURS = re.compile(rf"({'|'.join(PACKAGES)})\b")
BRINGS_SGLANG = {"compat", "import_module", "sglang"}
PASSES_ON = {"enumerate", "iter", "list", "next", "reversed", "sorted", "vars", "zip"}
"""Builtins whose result holds their arguments, or is a part of them."""
MUTATES = re.compile(
    r"append|extend|insert|remove|pop|popitem|clear|update|discard|setdefault|sort|reverse|register"
    r"|_?(add|apply|set)(_\w+)?|__(set|del)(attr|item)__"
)
SETS = re.compile(r"(setattr|delattr|.*\.__(set|del)attr__)$")
OF_SGLANG = re.compile(r"(typing\.)?Any|(torch\.)?nn\.Module|None")


@dataclass(frozen=True)
class Use:
    """One place."""

    code: str
    """Such as ``scheduler.waiting_queue``, or ``setattr(layer, name, x)``."""
    name: str
    """What is written or read, or empty where the code computes its name."""


class Uses(ast.NodeVisitor):
    """Collects the uses of one file.

    Args:
        fields: attributes of the classes of all files.
    """

    def __init__(self, tree: ast.Module, fields: set[str]) -> None:
        self.fields, self.own = fields, fields_of(tree) | methods_of(tree)
        self.holds_sglang = {
            ast.unparse(field.target)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for field in node.body
            if isinstance(field, ast.AnnAssign)
            and OF_SGLANG.fullmatch(ast.unparse(field.annotation))
        }
        """Fields of the file's classes."""
        self.writes: list[Use] = []
        self.reads: list[Use] = []
        """Attributes and globals, and private names also of what may be SGLang's."""
        self.scope: Scope = {}
        self.of_self: Scope = {}
        """Of attributes such as ``self.x``."""
        self.constants = {
            ast.unparse(node.targets[0]): node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        self._enter(tree.body)
        self.visit(tree)

    # -- whose object an expression is

    def owner(self, node: ast.AST) -> tuple[Owner, str]:
        """Whose object it is, and the last name of its expression."""
        if isinstance(node, ast.Name):
            known = "sglang" if node.id in BRINGS_SGLANG else "unknown"
            return self.scope.get(node.id, (known, node.id))
        if isinstance(node, ast.Attribute):
            if is_ours(node.attr):
                return "unknown", node.attr
            if ast.unparse(node) in self.of_self:
                return self.of_self[ast.unparse(node)]
            owner = self._part(node.value)
            holds = owner == "unknown" and node.attr in self.holds_sglang
            return "sglang" if holds else owner, node.attr
        if isinstance(node, ast.Subscript):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            owner, name = self._part(node.value), self.owner(node.value)[1]
            return owner, key if isinstance(key, str) else name
        if isinstance(node, ast.Call):
            name = self.owner(node.func)[1]
            if name == "getattr":
                name = self._constant(node.args[1])
                return "unknown" if is_ours(name) else self._part(node.args[0]), name
            if name in PASSES_ON:
                return self._any_of(node.args), name
            is_class = isinstance(node.func, ast.Name) and node.func.id[:1].isupper()
            return "other" if is_class else self._part(node.func), name
        if isinstance(node, ast.BoolOp):
            return self._any_of(node.values), ""
        if isinstance(node, ast.IfExp):
            return self._any_of([node.body, node.orelse]), ""
        if isinstance(node, ast.Await | ast.Starred | ast.NamedExpr):
            return self.owner(node.value)
        return "unknown", ""

    def _part(self, node: ast.AST) -> Owner:
        """Whose an attribute, an item or the result of this is."""
        if isinstance(node, ast.Name) and node.id in ("self", "cls"):
            return "unknown"
        return self.owner(node)[0]

    def _any_of(self, nodes: list[ast.expr]) -> Owner:
        owners = {self.owner(node)[0] for node in nodes}
        return "sglang" if "sglang" in owners else "other" if owners == {"other"} else "unknown"

    # -- scopes

    def _enter(self, body: Sequence[ast.AST]) -> None:
        """Learn the names of a module or a function; those of its own functions come later."""
        for _ in range(2):  # a name may come from one that is set further down, in a loop
            for node in _own_nodes(body):
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self._imported(name, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self._imported(alias.asname or alias.name, node.module or "")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._assign(node.target, node.iter)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr)

    def _imported(self, name: str, module: str) -> None:
        if name not in BRINGS_SGLANG:
            self.scope[name] = ("unknown" if OURS.match(module) else "other", name)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for each, its_value in zip(target.elts, values, strict=False):
                self._assign(each, its_value)
        elif isinstance(target, ast.Name) and self.scope.get(target.id, ("",))[0] != "sglang":
            self.scope[target.id] = self.owner(value)
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            self.of_self[ast.unparse(target)] = self.owner(value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.scope = self.scope, dict(self.scope)
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            kind = ast.unparse(each.annotation) if each.annotation else "None"
            is_any = each.arg not in ("self", "cls") and OF_SGLANG.fullmatch(kind)
            named = self.owner(each.annotation)[0] if each.annotation else "unknown"
            self.scope[each.arg] = ("sglang" if is_any else named, each.arg)
        for rest in filter(None, (arguments.vararg, arguments.kwarg)):
            self.scope[rest.arg] = ("unknown", rest.arg)
        self._enter(node.body)
        self.generic_visit(node)
        self.scope = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    # -- uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        known = self.own if is_own else self.fields
        owner = self._part(node.value)
        counts = owner == "sglang" or (owner == "unknown" and node.attr not in known)
        if counts and not is_own and not isinstance(node.ctx, ast.Load):
            self.writes.append(Use(ast.unparse(node), node.attr))
        if owner == "sglang" or (counts and re.match("_[^_]", node.attr)):
            self.reads.append(Use(ast.unparse(node), node.attr))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        owner, name = self.owner(node.value)
        if owner == "sglang" and not isinstance(node.ctx, ast.Load):
            self.writes.append(Use(ast.unparse(node), name))
        if name == "__globals__":
            self.reads.append(Use(ast.unparse(node), self.owner(node)[1]))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        code = ast.unparse(node.func)
        if SETS.match(code):
            if self.owner(node.args[0])[0] == "sglang" or code != "object.__setattr__":
                self.writes.append(Use(ast.unparse(node), self._constant(node.args[1])))
        elif isinstance(node.func, ast.Attribute) and MUTATES.fullmatch(node.func.attr):
            owner, name = self.owner(node.func.value)
            if owner == "sglang":
                self.writes.append(Use(code, node.func.attr if name == "compat" else name))
        if code in ("getattr", "hasattr") and self._part(node.args[0]) == "sglang":
            self.reads.append(Use(ast.unparse(node), self._constant(node.args[1])))
        self.generic_visit(node)

    def _constant(self, node: ast.expr) -> str:
        """The string that an argument is, or an empty one."""
        found = (
            node.value if isinstance(node, ast.Constant) else self.constants.get(ast.unparse(node))
        )
        return found if isinstance(found, str) else ""


def is_ours(name: str) -> bool:
    """Whether an attribute of SGLang's objects is one that we added."""
    return name.startswith(("fp8rl", "_fp8rl"))


def fields_of(tree: ast.AST) -> set[str]:
    """Attributes of the classes of a file."""
    fields = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            fields |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.ClassDef):
            fields |= {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    return fields


def methods_of(tree: ast.AST) -> set[str]:
    """Names of functions in a file, and what its classes assign in their bodies."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            assigned = [each for each in node.body if isinstance(each, ast.Assign)]
            names |= {ast.unparse(target) for each in assigned for target in each.targets}
    return names


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes but those of functions and classes inside, which have names of their own."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _own_nodes(list(ast.iter_child_nodes(node)))
