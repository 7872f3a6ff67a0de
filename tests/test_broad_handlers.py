"""Which code may go on after an error of any kind: the few functions that are named here."""

import ast
from collections.abc import Iterator
from textwrap import indent

import pytest

from tests.test_imports import PACKAGES, ROOT, imported, module_of

EVERYTHING = {"Exception", "BaseException"}
PERMITTED = {
    "sgl_fp8rl/receiver/rank_server.py:serve": "a trainer's message must not end the server",
    "sgl_fp8rl/receiver/relay/relay.py:Relay._run": "trainer and ranks would wait for its thread",
    "sgl_fp8rl/protocol/values.py:attempt": "other ranks wait for the error and would not hear it",
    "sgl_fp8rl/verl/plugin.py:register_trainer": "verl goes on without our trainer",
    "sgl_fp8rl/tools/doctor/command.py:run_checks": "a broken installation still gets its report",
}
TELLS_THE_OTHERS = {
    "sgl_fp8rl.receiver.update_steps",
    "trainer_bridge.adapters.contract",
    "trainer_bridge.adapters.trl",
    "trainer_bridge.adapters.updates",
    # whatever a decoder makes of a file, it is not sound; and a follower looks again
    "trainer_bridge.chain.files",
    "trainer_bridge.chain.follower",
    "trainer_bridge.chain.index",
    "trainer_bridge.ranks.collective",
    "trainer_bridge.fp8.fp8_forward",
    "trainer_bridge.shards.shard_codes",
    "trainer_bridge.updates.shared_sending",
    "trainer_bridge.sources.parameters",
    "trainer_bridge.sources.tied_head",
    "trainer_bridge.updates.weights",
}
"""Modules that call ``attempt``: each passes the error on to the other ranks, or to its caller."""


def swallows(node: ast.AST) -> bool:
    """Whether it is a handler of every error, or a ``suppress`` of it, that may not raise."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
        return any(map(is_broad, node.args))
    if not isinstance(node, ast.ExceptHandler) or not is_broad(node.type):
        return False
    leaves = any(isinstance(inner, ast.Return | ast.Continue | ast.Break) for inner in walk(node))
    return leaves or not isinstance(node.body[-1], ast.Raise)


def is_broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name is None or ast.unparse(name).split(".")[-1] in EVERYTHING for name in names)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """What runs in a handler: not the bodies of functions that it defines."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from walk(child)


def broad_in(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, int]]:
    """Function and line of each handler that goes on after any error."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}".lstrip(".")
        elif swallows(node):
            yield scope, node.lineno  # type: ignore[attr-defined]
        yield from broad_in(node, inner)


def test_only_these_functions_go_on_after_any_error() -> None:
    """Each with its reason on the line of the handler, too."""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        for scope, line in broad_in(ast.parse(text)):
            found.add(f"{path.relative_to(ROOT)}:{scope}")
            _, _, comment = text.splitlines()[line - 1].partition("#")
            assert len(comment.removeprefix(" noqa: BLE001").split()) > 2, (path, line)
    assert found == PERMITTED.keys()


def test_what_an_attempt_fails_with_is_passed_on() -> None:
    attempt, users = "sgl_fp8rl.protocol.values.attempt", set[str]()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        module = module_of(path.relative_to(ROOT))
        if attempt in imported(ast.parse(path.read_text()), module):
            users.add(module)
    assert users == TELLS_THE_OTHERS


@pytest.mark.parametrize(
    ("handler", "is_found"),
    [
        ("except Exception:\n  pass", True),
        ("except BaseException as error:\n  log(error)", True),
        ("except:\n  pass", True),
        ("except (ValueError, Exception):\n  pass", True),
        ("except builtins.Exception:\n  return 1", True),
        ("except Exception as error:\n  if known(error):\n   return 1\n  raise", True),
        ("except Exception as error:\n  if not known(error):\n   raise", True),
        ("except Exception:\n  with suppress(OSError):\n   raise", True),
        ("except ValueError:\n  with contextlib.suppress(Exception):\n   pass", True),
        ("except Exception:\n  close()\n  raise", False),
        ("except Exception as error:\n  raise ValueError('a') from error", False),
        ("except Exception:\n  def f():\n   return 1\n  raise", False),
        ("except (ValueError, OSError):\n  pass", False),
        ("except ValueError:\n  with suppress(OSError):\n   pass", False),
    ],
)
def test_a_planted_handler_is_found(handler: str, is_found: bool) -> None:
    code = ast.parse("class A:\n def b(self):\n  try:\n   c()\n" + indent(handler, "  "))
    assert [scope for scope, _ in broad_in(code)] == (["A.b"] if is_found else [])
