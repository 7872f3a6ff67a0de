"""What an import loads, each in a fresh interpreter, and which file imports which."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGES = ("server_args", "sgl_fp8rl", "trainer_bridge")
ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    "server_args",
    "sgl_fp8rl sgl_fp8rl.constants sgl_fp8rl.options sgl_fp8rl.after_import sgl_fp8rl.tables",
    "sgl_fp8rl.ops",
    "sgl_fp8rl.formats",
    # what trainer and engine share
    "sgl_fp8rl.protocol",
    # the trainer: nothing that knows SGLang is below it
    "trainer_bridge.engines trainer_bridge.router_replay",
    "trainer_bridge.sources",
    "trainer_bridge.ranks",
    "trainer_bridge.transport trainer_bridge.kv",
    "trainer_bridge.transfer",
    "trainer_bridge.shards",
    "trainer_bridge.ways",
    "trainer_bridge.session",
    "trainer_bridge.updates trainer_bridge.rollouts trainer_bridge.fp8 trainer_bridge.sampling",
    "trainer_bridge.metrics",
    "trainer_bridge.correction",
    "trainer_bridge.chain",
    "trainer_bridge",
    # adapters of trainers: nothing of the engine
    "trainer_bridge.adapters sgl_fp8rl.integrations",
    # any engine's rank
    "sgl_fp8rl.receiver.kv sgl_fp8rl.receiver.routes",
    "sgl_fp8rl.receiver.writers",
    "sgl_fp8rl.receiver",
    "sgl_fp8rl.receiver.relay",
    # SGLang
    "sgl_fp8rl.engine.compat",
    "sgl_fp8rl.engine.gemm sgl_fp8rl.engine.cpu",
    "sgl_fp8rl.engine.layers",
    "sgl_fp8rl.engine.control",
    "sgl_fp8rl.engine.attention",
    "sgl_fp8rl.engine.startup",
    "sgl_fp8rl.engine",
    # what sees both ends
    "sgl_fp8rl.verl",
    "sgl_fp8rl.tools.precision sgl_fp8rl.tools.plan sgl_fp8rl.tools.doctor",
    "sgl_fp8rl.tools",
)
"""Modules and packages, the lowest first: a file imports its own layer and those below. The longest
name that fits a file is its layer's. A package does not stand for its files' ``__init__``, which
Python runs first: what matters is what a file names."""

FRAMEWORKS = {
    *("trl", "accelerate", "peft", "datasets", "transformers"),
    *("ray", "verl", "tensordict", "transfer_queue", "hydra", "omegaconf"),
    *("slime", "miles", "megatron", "mbridge", "transformer_engine"),
}
"""Training frameworks, and what they bring; the engine's SGLang loads some of it for itself."""

Graph = dict[str, set[str]]
"""Modules that each module imports, inside of functions as well."""


def import_graph(root: Path) -> Graph:
    """The imports between all files of the packages under ``root``."""
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    files = {module_of(path.relative_to(root)): path for path in paths}
    graph: Graph = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = imported(ast.parse(path.read_text()), package)
        owners = {name if name in files else name.rpartition(".")[0] for name in names}
        graph[module] = owners & files.keys() - {module}
    return graph


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names that the code imports, but for what only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node = ast.Module(node.orelse, [])
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            home = [*parents, node.module or ""] if node.level else [node.module or ""]
            yield from (".".join(filter(None, [*home, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))
        yield from imported(node, package)


def cycle_in(graph: Graph) -> list[str]:
    """The modules of a cycle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def climbs_in(graph: Graph) -> list[str]:
    """Imports of a higher layer."""
    return [
        f"{module} imports {other}"
        for module, others in sorted(graph.items())
        for other in sorted(others)
        if layer_of(other) > layer_of(module)
    ]


def layer_of(module: str) -> int:
    found = {name: index for index, names in enumerate(LAYERS) for name in names.split()}
    while module not in found:
        module = module.rpartition(".")[0]
    return found[module]


def test_imports_flow_one_way() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 120 and sum(map(len, graph.values())) > 300
    assert cycle_in(graph) == []
    assert climbs_in(graph) == []


def test_every_layer_has_files() -> None:
    graph = import_graph(ROOT)
    assert {layer_of(module) for module in graph} == set(range(len(LAYERS)))
    assert {name for names in LAYERS for name in names.split()} <= graph.keys()


@pytest.mark.parametrize(
    ("file", "line", "cycle", "climb"),
    [
        ("ops/a.py", "def f():\n    from sgl_fp8rl.ops import b", True, False),
        ("ops/a.py", "from . import b", True, False),
        ("ops/a.py", "if TYPE_CHECKING:\n    from sgl_fp8rl.ops.b import B", False, False),
        ("ops/c.py", "def f():\n    from sgl_fp8rl.protocol.d import D", False, True),
        ("ops/c.py", "import sgl_fp8rl.protocol.d", False, True),
        ("ops/c.py", "importlib.import_module('sgl_fp8rl.protocol.d')", False, True),
    ],
)
def test_a_planted_cycle_and_a_planted_climb_are_found(
    file: str, line: str, cycle: bool, climb: bool, tmp_path: Path
) -> None:
    files = {"__init__.py": "", "ops/a.py": "", "ops/b.py": "import sgl_fp8rl.ops.a"}
    files |= {"ops/__init__.py": "", "protocol/__init__.py": "", "protocol/d.py": "", file: line}
    for name, text in files.items():
        path = tmp_path / "sgl_fp8rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = import_graph(tmp_path)
    assert (bool(cycle_in(graph)), bool(climbs_in(graph))) == (cycle, climb)


def loaded_by(code: str) -> set[str]:
    """Top-level modules in ``sys.modules`` after ``code``, in an interpreter of its own."""
    program = f"import sys, json\n{code}\n"
    program += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout.splitlines()[-1]))


def test_server_args_is_stdlib_only() -> None:
    # Compared with a bare interpreter: site hooks of an environment may load anything.
    loaded = loaded_by("import server_args") - loaded_by("")
    assert "server_args" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"server_args"}


@pytest.mark.parametrize(
    "module",
    ["trainer_bridge", "trainer_bridge.adapters.slime", "sgl_fp8rl.tools.precision.command"],
)
def test_trainer_and_precision_load_no_sglang(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert "torch" in loaded
    assert not {name for name in loaded if name.startswith("sglang") or name == "sgl_kernel"}


def without_frameworks() -> list[str]:
    """Our modules, but for the adapters that are imported where their framework is, and what
    imports SGLang, which needs transformers."""
    graph = import_graph(ROOT)
    names = {name for name in graph if not name.endswith(("adapters.trl", "integrations.trl"))}
    engine, verl = "sgl_fp8rl.engine.", "sgl_fp8rl.verl."
    ours = {name for name in names if not name.startswith((engine, verl))}
    return sorted(ours | {f"{engine}plugin", f"{verl}rollout_config"})


def test_no_framework_is_loaded() -> None:
    modules = without_frameworks()
    assert len(modules) > 100
    loaded = loaded_by(f"import {', '.join(modules)}")
    assert {"torch", *PACKAGES} <= loaded
    assert not loaded & FRAMEWORKS


WITHOUT = """
import os, sys, torch, traceback
for missing in {missing}:
    if (child := os.fork()) == 0:
        status = 1
        try:
            sys.modules.update(dict.fromkeys(missing))
            import {modules}
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, missing
"""


def test_nothing_needs_a_framework() -> None:
    """As where each is not installed, and where none is."""
    missing = [sorted(FRAMEWORKS), *([name] for name in sorted(FRAMEWORKS))]
    loaded_by(WITHOUT.format(missing=missing, modules=", ".join(without_frameworks())))


def test_what_needs_a_framework_is_found() -> None:
    """The control of the test above."""
    code = WITHOUT.format(missing=[["trl"]], modules="trainer_bridge.adapters.trl")
    with pytest.raises(AssertionError, match=r"adapters\.trl cannot import TRL"):
        loaded_by(code)


def test_the_adapter_of_trl_needs_no_other_framework() -> None:
    others = FRAMEWORKS - {"trl", "accelerate", "datasets", "transformers"}
    code = f"import sys; sys.modules.update(dict.fromkeys({others}))\n"
    loaded = loaded_by(f"{code}import trainer_bridge.adapters.trl")
    assert {"trl", "accelerate", "transformers"} <= loaded


def test_plan_loads_no_torch() -> None:
    """Which takes longer than all that it computes."""
    loaded = loaded_by("import sgl_fp8rl.tools.cli, sgl_fp8rl.tools.plan.command")
    assert not loaded & {"torch", "numpy", "sglang"}


def test_sgl_fp8rl_loads_neither_torch_nor_sglang() -> None:
    loaded = loaded_by("import sgl_fp8rl; assert sgl_fp8rl.__version__")
    assert "sgl_fp8rl" in loaded
    assert not loaded & {"torch", "numpy", "sglang", "trainer_bridge", "server_args"}


def test_what_pages_named_before_folders_is_there_for_one_release() -> None:
    from trainer_bridge.rollouts.sampling import check_sampling
    from trainer_bridge.sampling import check_sampling as before

    assert before is check_sampling


@pytest.mark.parametrize("name", ["contract", "rollouts", "slime", "trl", "updates"])
def test_the_old_name_of_an_adapter_is_the_same_module(name: str) -> None:
    """What users write in YAML and scripts keeps working for one release."""
    if name == "trl":
        pytest.importorskip("trl")
    loaded_by(
        f"import sgl_fp8rl.integrations.{name} as old, trainer_bridge.adapters.{name} as new\n"
        "assert old is new"
    )
