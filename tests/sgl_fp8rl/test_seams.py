"""What the doctor says of training frameworks: missing symbols, pins that clash, no adapter."""

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_fp8rl.tools.doctor import installation, seams
from sgl_fp8rl.tools.doctor.check import Check
from sgl_fp8rl.tools.doctor.seams import Framework
from tests.integrations.slime import frameworks

ROOT = Path(__file__).resolve().parents[2]
NAME = "planted-framework"
TRAINER = "planted_framework.train.trainer"
SOURCE = """
try:
    from elsewhere import Registry, Loader as Reader
except ImportError:
    Registry = None

FOLLOWING: dict[str, int]

def build():
    local = 1

class Trainer:
    field: int = 0

    def __init__(self):
        self.engine, self.step = None, 0
        other.borrowed = local = 1

    async def send(self):
        return self.read_only
"""
SYMBOLS = tuple(
    f"{TRAINER}:{name}"
    for name in (
        *("Registry", "Reader", "FOLLOWING", "build", "Trainer"),
        *("Trainer.field", "Trainer.engine", "Trainer.step", "Trainer.send", "Trainer.read_only"),
    )
)
Plant = Callable[..., list[Check]]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Install a framework whose import fails, and let the doctor look at it alone."""

    def checks(framework: Framework, *requires: str, source: str = SOURCE) -> list[Check]:
        package = tmp_path / "planted_framework"
        (package / "train").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('this import fails')")
        (package / "train" / "trainer.py").write_text(source)
        info = tmp_path / "planted_framework-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {NAME}", "Version: 1.0"]
        lines += [f"Requires-Dist: {need}" for need in requires]
        (info / "METADATA").write_text("\n".join([*lines, "", ""]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(seams, "FRAMEWORKS", {NAME: framework})
        monkeypatch.setattr(seams, "NO_ADAPTER", ())
        found = list(installation.check_frameworks())
        assert not {name for name in sys.modules if name.startswith("planted_framework")}
        return found

    return checks


def test_symbols_are_found_without_an_import(plant: Plant) -> None:
    (check,) = plant(Framework("1.0", SYMBOLS, needs=("torch",)))
    assert (check.name, check.status) == (NAME, "ok")
    assert "1.0" in check.message and str(len(SYMBOLS)) in check.message


@pytest.mark.parametrize(
    "symbol",
    [
        f"{TRAINER}:Loader",  # it has another name here
        f"{TRAINER}:local",
        f"{TRAINER}:Trainer.local",
        f"{TRAINER}:Trainer.borrowed",
        f"{TRAINER}:Trainer.build",
        f"{TRAINER}:send",
    ],
)
def test_a_missing_symbol_is_named(plant: Plant, symbol: str) -> None:
    (check,) = plant(Framework("1.0", (*SYMBOLS, symbol)))
    assert check.status == "warn"
    assert symbol.replace(":", ".") in check.message
    assert seams.missing_symbols((*SYMBOLS, symbol)) == [symbol.replace(":", ".")]
    assert f"pip install --no-deps {NAME}==1.0" in check.message


@pytest.mark.parametrize(
    ("module", "source"),
    [(TRAINER, "class Trainer(:"), (TRAINER, "a = '\0'"), ("planted_framework.gone", SOURCE)],
)
def test_a_module_that_cannot_be_read_is_named_once(plant: Plant, module: str, source: str) -> None:
    framework = Framework("1.0", (f"{module}:Trainer", f"{module}:build"))
    (check,) = plant(framework, source=source)
    assert check.status == "warn"
    assert check.message.count(module) == 1


def test_another_version_and_a_missing_need_are_warnings(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = plant(Framework("1.1", SYMBOLS, source="git+https://forge/planted@1.1"))
    assert check.status == "warn"
    assert "pip install --no-deps git+https://forge/planted@1.1" in check.message
    needing = Framework("1.0", SYMBOLS, needs=("torch", "no-such-distribution"))
    monkeypatch.setattr(seams, "FRAMEWORKS", {NAME: needing})
    (check,) = installation.check_frameworks()
    assert check.status == "warn"
    assert "no-such-distribution" in check.message and "torch" not in check.message
    monkeypatch.setattr(seams, "installed", {"torch": "2.11.0", "sglang": "0.5.17"}.get)
    assert list(installation.check_frameworks()) == []  # of what is not there nothing is said


@pytest.mark.parametrize(
    ("requirement", "clashes"),
    [
        ("torch<2", True),
        ("Torch!=2.11.0,>=2", True),
        ("torch==2.11.0", False),  # also with a local version
        ("torch>=2.10", False),
        ("torch", False),
        ("numpy<2", True),
        ("sglang==0.5.12", False),  # not installed
        ('torch<2; extra == "engine"', True),
        ('torch<2; extra == "docs"', False),
        ('torch<2; python_version < "3"', False),
        ('torch<2; python_version > "3" and extra == "engine"', True),
        ("torch[opt]<2", True),
    ],
)
def test_a_pin_that_clashes_is_a_warning(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, requirement: str, clashes: bool
) -> None:
    versions = {NAME: "1.0", "torch": "2.11.0+cpu", "numpy": "2.3.0"}
    monkeypatch.setattr(seams, "installed", versions.get)
    framework = Framework("1.0", SYMBOLS, extra="engine")
    first, *pins = plant(framework, requirement, "transformers>=5")
    assert first.status == "ok"
    assert [check.status for check in pins] == ["warn"] * clashes
    for check in pins:
        assert (requirement[:5] == "numpy") is ("numpy<2 (2.3.0 is installed)" in check.message)
        assert (requirement[:5] != "numpy") is ("2.11.0+cpu" in check.message)
        assert f"pip install --no-deps {NAME}==1.0" in check.message


@pytest.mark.parametrize(
    ("name", "beside", "clashes"),
    [
        ("verl", {"trl": "1.16.0"}, True),
        ("verl", {"trl": "1.12.0"}, False),
        ("verl", {}, False),
        ("slime", {"numpy": "2.3.5"}, True),
        ("slime", {"numpy": "1.26.4"}, False),
    ],
)
def test_what_cannot_be_beside_a_framework(
    monkeypatch: pytest.MonkeyPatch, name: str, beside: dict[str, str], clashes: bool
) -> None:
    """What its metadata does not say."""
    monkeypatch.setattr(seams.metadata, "requires", lambda distribution: None)
    monkeypatch.setattr(seams, "FRAMEWORKS", {name: seams.FRAMEWORKS[name]})
    installed = {name: seams.FRAMEWORKS[name].version, **beside}
    monkeypatch.setattr(seams, "installed", installed.get)
    _, *pins = installation.check_frameworks()
    assert [(check.name, check.status) for check in pins] == [(f"{name} pins", "warn")] * clashes
    assert all(version in check.message for check in pins for version in beside.values())


def test_a_framework_without_adapter_is_sent_to_the_page_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    section = re.split(r"^## ", page.partition("\n## Without an adapter\n")[2], flags=re.M)[0]
    for name in seams.NO_ADAPTER:
        monkeypatch.setattr(seams, "installed", {name: "7.8.9"}.get)
        (check,) = installation.check_frameworks()
        assert (check.name, check.status) == (name, "skip")
        assert "7.8.9" in check.message and "docs/frameworks.md" in check.message
        assert f"| {name} " in section.lower()
    named = {*re.findall(r"^\| ([\w-]+) [(\d]", section.lower(), re.M)}
    assert named - {"roll"} == {*seams.NO_ADAPTER}


@pytest.mark.parametrize("name", seams.FRAMEWORKS)
def test_the_tested_version_has_every_symbol(name: str) -> None:
    framework = seams.FRAMEWORKS[name]
    if seams.installed(name) != framework.version:
        pytest.skip(f"{name} {framework.version} is not installed")
    assert seams.missing_symbols(framework.symbols) == []
    # control: each one is looked for in that framework's source
    gone = replace(framework, symbols=tuple(f"{symbol}_gone" for symbol in framework.symbols))
    assert len(seams.missing_symbols(gone.symbols)) == len(framework.symbols)


OF_TRL = "trainer_bridge/adapters/trl.py"
OF_SLIME = "trainer_bridge/adapters/slime.py"
ADAPTERS = {"trl": OF_TRL, "verl": "sgl_fp8rl/verl/*.py", "slime": OF_SLIME, "miles": OF_SLIME}


OF_TRANSFORMERS = {"accelerator", "add_callback", "args", "model", "state"}
"""What every ``Trainer`` of transformers has."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_adapters_use_what_is_looked_for(name: str) -> None:
    files = ROOT.glob(ADAPTERS[name])
    words = set(re.findall(r"\w+", "".join(file.read_text() for file in files)))
    used = {re.split(r"[:.]", symbol)[-1] for symbol in seams.FRAMEWORKS[name].symbols}
    assert len(used) > 4 and used <= words


def test_what_the_adapter_of_trl_uses_is_looked_for() -> None:
    """All that it reads or sets of a trainer, its options and its backend."""
    owners = ("trainer", "self._trainer", "args", "sharding")
    nodes = ast.walk(ast.parse((ROOT / OF_TRL).read_text()))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    used = {each.attr for each in attributes if ast.unparse(each.value) in owners}
    known = {symbol.rpartition(".")[2] for symbol in seams.FRAMEWORKS["trl"].symbols}
    assert used > OF_TRANSFORMERS and len(used) > 20
    assert used - OF_TRANSFORMERS <= known


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_what_the_updater_uses_is_looked_for(name: str) -> None:
    """The updater's tests run on stand-ins that have nothing else of the framework."""
    used = set()
    for module, stand_in in frameworks.modules(name).items():
        for value, thing in vars(stand_in).items():
            if value.startswith("__"):
                continue
            methods = [m for m in vars(thing) if not m.startswith("__")]
            used |= {f"{module}:{value}.{m}" for m in methods} or {f"{module}:{value}"}
    assert len(used) == 4
    # beside them, the framework's function that calls ours
    (caller,) = {*seams.FRAMEWORKS[name].symbols} ^ used
    assert caller == f"{name}.backends.megatron_utils.initialize:init"
