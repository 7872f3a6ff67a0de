"""The options of a process: read once, and handed on by the environment."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import server_args
import sgl_fp8rl
import trainer_bridge
from server_args import Fp8RLServerArgs
from sgl_fp8rl.options import current_options, export_flags, export_keywords, read_options


def test_options_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a wrong variable is reported each time."""
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    for _ in "twice":
        with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
            current_options()
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "1KiB")
    assert current_options().bucket_bytes == 1024
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "2KiB")
    assert current_options().bucket_bytes == 1024
    assert read_options().bucket_bytes == current_options().bucket_bytes == 2048


def test_flags_reach_spawned_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Fp8RLServerArgs(bucket_bytes=1024, kv_scheme="trainer", ignored_layers=("a", "b"))
    for variable in options.to_env():
        monkeypatch.setenv(variable, "")  # put back by it at the end
    export_flags(options)
    assert current_options() == Fp8RLServerArgs.from_env(dict(os.environ)) == options


def test_keywords_reach_one_engine_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_KEY", "before")
    monkeypatch.delenv("FP8RL_IGNORED_LAYERS", raising=False)
    options = export_keywords({"ignored_layers": ("mlp",), "key": "mine"})
    assert (os.environ["FP8RL_IGNORED_LAYERS"], os.environ["FP8RL_KEY"]) == ("mlp", "mine")
    assert (options.ignored_layers, options.key) == (("mlp",), "mine")
    assert current_options() == options
    export_keywords({})
    assert "FP8RL_IGNORED_LAYERS" not in os.environ
    assert os.environ["FP8RL_KEY"] == current_options().key == "before"
    assert export_keywords({"key": None}).key is None and "FP8RL_KEY" not in os.environ
    assert export_keywords({}).key == os.environ["FP8RL_KEY"] == "before"


def test_wrong_keywords_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_KEY", "before")
    before = dict(os.environ)
    with pytest.raises(ValueError, match="bucket_bytes"):
        export_keywords({"key": "mine", "bucket_bytes": 7})
    assert dict(os.environ) == before and current_options().key == "before"


def test_a_refused_engine_leaves_nothing_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FP8RL_LISTEN", "FP8RL_KEY"):
        monkeypatch.delenv(variable, raising=False)
    export_keywords({"listen": "any", "key": "mine"})
    with pytest.raises(ValueError, match="key"):
        export_keywords({"listen": "any"})
    assert not {"FP8RL_LISTEN", "FP8RL_KEY"} & os.environ.keys()
    assert export_keywords({"listen": "loopback"}).listen == "loopback"
    export_keywords({})


MAY_NAME_VARIABLES = {
    "sgl_fp8rl/options.py": "reads and sets them",
    "server_args/args.py": "makes options of them",
    "sgl_fp8rl/engine/plugin.py": "has what a command line leaves out filled in",
    "trainer_bridge/engines/engine_client.py": "reads a trainer's only one, the key",
    "sgl_fp8rl/tools/doctor/installation.py": "says which of them no option reads",
    "sgl_fp8rl/engine/control/internal_requests.py": "names SGLang's warm-up, not a variable",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in (server_args, sgl_fp8rl, trainer_bridge):
        home = Path(str(package.__file__)).parent
        for path in home.rglob("*.py"):
            yield str(path.relative_to(home.parent)), ast.parse(path.read_text())


def names_a_variable(tree: ast.Module) -> bool:
    """Whether code could read an ``FP8RL_*`` variable, under whatever name it has the environment:
    a text is the name of one or its beginning, or a function makes a name or reads them all."""
    makers = {"env_name", "ENV_PREFIX", "from_env", "from_namespace"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch("FP8RL_[A-Z_]*", str(node.value)):
            return True
        if {getattr(node, "id", None), getattr(node, "attr", None)} & makers:
            return True
    return False


def test_one_file_of_a_side_reads_the_environment() -> None:
    readers = {path for path, tree in sources() if names_a_variable(tree)}
    assert readers == MAY_NAME_VARIABLES.keys()


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("os.environ['FP8RL_KEY']", True),
        ("os.environ.get('FP8RL_DEBUG')", True),
        ("os.getenv('FP8RL_KEY', '')", True),
        ("'FP8RL_KEY' in environ", True),
        ("VARIABLE = 'FP8RL_KEY'", True),
        ("os.environ[f'FP8RL_{option}']", True),
        ("environ.get(server_args.env_name('key'))", True),
        ("Fp8RLServerArgs.from_env()", True),
        ("raise ValueError('FP8RL_KEY is wrong')", False),
        ("os.environ.get('SGLANG_PLUGINS')", False),
    ],
)
def test_a_planted_read_is_found(line: str, is_found: bool) -> None:
    assert names_a_variable(ast.parse(line)) is is_found
