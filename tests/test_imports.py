"""What an import loads, each in a fresh interpreter."""

import json
import subprocess
import sys

import pytest


def loaded_by(code: str) -> set[str]:
    """Top-level modules in ``sys.modules`` after ``code``, in an interpreter of its own."""
    program = f"import sys, json\n{code}\n"
    program += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout.splitlines()[-1]))


def test_server_args_is_stdlib_only() -> None:
    # Compared with a bare interpreter: site hooks of an environment may load anything.
    loaded = loaded_by("import server_args") - loaded_by("")
    assert "server_args" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"server_args"}


def test_trainer_bridge_loads_no_sglang() -> None:
    loaded = loaded_by("import trainer_bridge")
    assert "torch" in loaded
    assert not {name for name in loaded if name.startswith("sglang") or name == "sgl_kernel"}


def test_precision_loads_no_sglang() -> None:
    loaded = loaded_by("import sgl_fp8rl.sensitivity.command")
    assert "torch" in loaded
    assert not {name for name in loaded if name.startswith("sglang") or name == "sgl_kernel"}


def test_sgl_fp8rl_loads_neither_torch_nor_sglang() -> None:
    loaded = loaded_by("import sgl_fp8rl; assert sgl_fp8rl.__version__; dir(sgl_fp8rl)")
    assert "sgl_fp8rl" in loaded
    assert not loaded & {"torch", "numpy", "sglang", "trainer_bridge", "server_args"}


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("update", "trainer_bridge"),
        ("rollout", "trainer_bridge"),
        ("correct", "trainer_bridge"),
        ("KVCalibrator", "trainer_bridge"),
        ("Fp8RLServerArgs", "server_args"),
    ],
)
def test_reexports_are_the_same_objects(name: str, home: str) -> None:
    loaded_by(
        "import importlib, sgl_fp8rl\n"
        f"offered = sgl_fp8rl.{name}\n"
        f"assert callable(offered) and offered is importlib.import_module({home!r}).{name}\n"
        f"assert {name!r} in sgl_fp8rl.__all__ and {name!r} in dir(sgl_fp8rl)\n"
        "from sgl_fp8rl import *\n"
        f"assert {name} is offered\n"
    )


def test_the_engine_side_does_not_take_the_name_update() -> None:
    """The engine side's folder is ``weight_update``, so ``sgl_fp8rl.update`` stays the call."""
    loaded_by(
        "import sgl_fp8rl.weight_update.session, trainer_bridge\n"
        "assert sgl_fp8rl.update is trainer_bridge.update\n"
    )


def test_unknown_name_is_an_attribute_error() -> None:
    loaded_by(
        "import sgl_fp8rl\n"
        "try: sgl_fp8rl.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError('no error')\n"
    )
