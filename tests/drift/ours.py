"""What of our code meets a function of SGLang, and whether it fits another signature."""

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from inspect import Signature
from pathlib import Path
from typing import Any

from tests.drift.sources import Function, Shape, bound, takes


class Ours:
    """Calls, hooks and methods of our classes.

    Args:
        files: code by path.
        hooked: the targets of hooks by the names under which our code registers them.
    """

    def __init__(self, files: Mapping[str, str], hooked: Mapping[str, Sequence[str]]) -> None:
        self._calls: dict[str, list[tuple[str, ast.Call]]] = defaultdict(list)
        self._takers: dict[str, list[tuple[str, Signature]]] = defaultdict(list)
        """By the target of a hook, which is here without ``original``, or the name of a method."""
        self.hooked: set[str] = set()
        """Targets whose hooks were found."""
        trees = {path: ast.parse(text) for path, text in files.items()}
        functions = {
            key: (f"{path}: {name}", node)
            for path, tree in trees.items()
            for name, node in bound(tree.body)
            if isinstance(node, Function)
            for key in ((name,), (Path(path).stem, name))
        }
        for path, node in ((path, node) for path, tree in trees.items() for node in ast.walk(tree)):
            pairs: list[tuple[Any, Any]] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self._calls[node.func.attr].append((f"{path}:{node.lineno}", node))
                if node.func.attr == "fromkeys" and len(node.args) == 2:
                    pairs = [(node.args[0], node.args[1])]
            elif isinstance(node, ast.Dict):
                pairs = list(zip(node.keys, node.values, strict=True))
            elif isinstance(node, ast.ClassDef):
                for name, member in bound(node.body):
                    if isinstance(member, Function) and not name.startswith("__"):
                        place = f"{path}: {node.name}.{name}"
                        self._takers[name].append((place, Shape(member).whole))
            for key, value in pairs:
                named = getattr(key, "attr", getattr(key, "value", None))
                *stem, function = ast.unparse(value).split(".")
                here = functions.get((stem[-1] if stem else Path(path).stem, function))
                found = here or functions.get((function,))  # imported
                if found and isinstance(named, str):
                    for target in hooked.get(named, ()):
                        self._add_hook(target, *found)

    def _add_hook(self, target: str, place: str, hook: Function) -> None:
        self.hooked.add(target)
        self._takers[target].append((place, Shape(hook, is_member=True).bound))
        self._calls[target] += [
            (place, node)
            for node in ast.walk(hook)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "original"
        ]

    def unfit(self, target: str, name: str, old: Shape, new: Shape) -> list[str] | None:
        """What fitted a function and does not any more; None if nothing is known to meet it.

        Args:
            target: its path.
            name: by which our code calls it.
        """
        takers = [*self._takers[target], *self._takers[name]]
        calls = [(place, call, old.bound, new.bound) for place, call in self._calls[name]]
        calls += [(p, call, old.whole, new.whole) for p, call in self._calls[target]]
        calls = [each for each in calls if fits(each[1], each[2])]
        if not takers and not calls:
            return None
        lost = [place for place, call, _, signature in calls if not fits(call, signature)]
        for place, ours in takers:
            pairs = zip(old.ways(), new.ways(), strict=True)
            ways = [(takes(ours.bind, *was), takes(ours.bind, *now)) for was, now in pairs]
            count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in ours.parameters.values())
            first, now = (list(shape.whole.parameters)[:count] for shape in (old, new))
            if (True, False) in ways or (ways[0][0] and first != now):
                lost.append(place)
        return list(dict.fromkeys(lost))


def fits(call: ast.Call, signature: Signature) -> bool:
    """Whether a call of ours binds; what it passes on by stars is not known."""
    args = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    is_whole = (len(args), len(keywords)) == (len(call.args), len(call.keywords))
    return takes(signature.bind if is_whole else signature.bind_partial, args, keywords)
