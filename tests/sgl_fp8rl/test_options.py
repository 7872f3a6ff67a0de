"""The options of a process: read once, and handed on by the environment."""

import ast
import os
from pathlib import Path

import pytest

import sgl_fp8rl
import trainer_bridge
from server_args import Fp8RLServerArgs
from sgl_fp8rl.options import current_options, export_flags, export_keywords, read_options


def test_options_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "1KiB")
    assert current_options().bucket_bytes == 1024
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "2KiB")
    assert current_options().bucket_bytes == 1024
    assert read_options().bucket_bytes == current_options().bucket_bytes == 2048


def test_a_wrong_variable_is_reported_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    for _ in "twice":
        with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
            current_options()


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


def test_wrong_keywords_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_KEY", "before")
    before = dict(os.environ)
    with pytest.raises(ValueError, match="bucket_bytes"):
        export_keywords({"key": "mine", "bucket_bytes": 7})
    assert dict(os.environ) == before and current_options().key == "before"


def test_one_file_reads_the_environment() -> None:
    homes = [Path(str(package.__file__)).parent for package in (sgl_fp8rl, trainer_bridge)]
    readers = {
        path.name
        for home in homes
        for path in home.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "from_env"
    }
    assert readers == {"options.py"}
