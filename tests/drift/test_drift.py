"""What is reported of a version that changed something, and that nothing else is."""

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_fp8rl.engine import compat
from tests.drift import __main__ as drift
from tests.drift.ours import Ours
from tests.drift.sources import Sources

A, B = "sglang/srt/a.py", "sglang/srt/b.py"
BASE = {
    "sglang/__init__.py": "",
    A: """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from sglang.srt.c import Owner
try:
    import no_such_library
except ImportError:
    no_such_library = None
from .b import *
from sglang.srt.c import circular
from sglang.srt.b import Base as Parent

def called(x, y=None): ...

class Owner(Parent[int]):
    def hooked(self, request, more=0): ...
    def loosely_hooked(self, request, flag=0): ...
    def overridden(self, x): ...
    def unmet(self, x): ...
    def __init__(self, layer):
        self.kept = 1
        layer.register_parameter("in_string", None)
        layer.moved = 1
""",
    "sglang/srt/c.py": "from sglang.srt.a import circular",
    B: """
from .a import *
class Base:
    in_base = 1
class Request(Base):
    rid: str = ""
class Variables:
    FLAG = 1
variables = Variables()
class Updater:
    def update(self): ...
""",
}
OURS = """
hooks = {"hooked": hook, "loose": loose}
def hook(original, owner, request, more=0):
    return original(owner, request, more)
def loose(original, owner, request, *args, **kwargs):
    return original(owner, request, *args, flag=1)
class Layer:
    def overridden(self, x):
        return compat.called(x, y=1), compat.Request(rid="a")
    def of_another(self, x):
        return x.called(1, 2, 3, 4)
"""
PATHS = {
    f"sglang.srt.a:{name}": name.rpartition(".")[2]
    for name in (
        *("called", "Request", "variables.FLAG"),
        *("Owner.hooked", "Owner.loosely_hooked", "Owner.overridden", "Owner.unmet"),
    )
}
OWNED = [("sglang.srt.a:Owner", name) for name in ("kept", "moved", "in_string", "in_base")]
OWNER = "sglang.srt.a.Owner"
Make = Callable[..., Sources]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an SGLang out of ``BASE`` with one part replaced."""
    monkeypatch.setattr(drift, "PATHS", PATHS)
    monkeypatch.setattr(drift, "OWNED", OWNED)
    monkeypatch.setattr(drift, "WRAPPED", [f"{OWNER}.{name}" for name in ("hooked", "unmet")])
    monkeypatch.setattr(compat, "UPDATER", "sglang.srt.b.Updater")
    monkeypatch.setattr(drift, "HARMLESS_UPDATES", {"update"})

    def make(version: str, old: str = "", new: str = "") -> Sources:
        texts = {name: text.replace(old, new) if old else text for name, text in BASE.items()}
        assert (texts != BASE) == (old != new)
        texts[f"sglang-{version}.dist-info/METADATA"] = f"Version: {version}\n"
        for name, text in texts.items():
            file = tmp_path / version / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Sources(tmp_path / version, PATHS, OWNED)

    return make


def changes(new: Sources, *tested: Sources) -> list[tuple[str, str]]:
    hooked = {"hooked": [f"{OWNER}.hooked"], "loose": [f"{OWNER}.loosely_hooked"]}
    lines = drift.compare(new, tested, Ours({"ours.py": OURS}, hooked)).lines
    return [(kind, line) for kind, found in lines.items() for line in found]


def test_what_is_the_same_is_no_change(make: Make) -> None:
    base = make("0.5.1")
    assert base.shapes.keys() >= PATHS.keys()
    assert base.find("sglang.srt.a:circular") is base.find("sglang.srt.b:no_such_name") is None
    assert all(name in base.owned[owner] for owner, name in OWNED)
    assert changes(make("0.5.2"), base) == []
    assert changes(make("0.5.3", "    def unmet", "    # a comment\n    def unmet"), base) == []


@pytest.mark.parametrize(
    ("old", "new", "kind", "said"),
    [
        ("def called(", "def renamed(", "gone", "`sglang.srt.a`: called"),
        ("def hooked(", "def renamed(", "gone", "Owner`: hooked"),
        ("FLAG = 1", "OTHER = 1", "gone", "variables`: FLAG"),
        ("self.kept", "self.other", "gone", "Owner`: kept"),
        ("self.kept = 1", "print(self.kept)", "gone", "Owner`: kept"),
        ("in_base = 1", "other = 1", "gone", "Owner`: in_base"),
        ('"in_string"', '"other"', "gone", "Owner`: in_string"),
        ("class Owner", "class Other", "gone", "`sglang.srt.a`: Owner"),
        ("layer.moved = 1", "pass\nclass New:\n    moved: int", "moved", f"Owner`: moved; `{A}`"),
        ("called(x, y=None)", "called(x, z=None)", "unfit", "with `z=None`: ours.py:9"),
        ("called(x, y=None)", "called(x, y=None, *, z)", "unfit", "with `z`: ours.py:9"),
        ('rid: str = ""', 'id: str = ""', "unfit", "ours.py:9"),
        ("request, more=0", "request, more=0, last=0", "unfit", "ours.py: hook"),
        ("request, more=0", "more, request=0", "unfit", "ours.py: hook"),
        ("request, more=0", "request", "unfit", "ours.py: hook"),
        ("request, flag=0", "req, flag=0", "unfit", "ours.py: loose"),
        ("request, flag=0", "request", "unfit", "ours.py: loose"),
        ("overridden(self, x)", "overridden(self, x, y)", "unfit", "ours.py: Layer.overridden"),
        ("def overridden", "async def overridden", "unfit", "marked `AsyncFunctionDef`"),
        ("unmet(self, x)", "unmet(self, x, y=0)", "unmet", "Owner.unmet`: with `y=0`"),
        ("unmet(self, x)", "unmet(self, y)", "unmet", "Owner.unmet`: without `x`, with `y`"),
        ("def unmet(self, x): ...", "unmet = 1", "unmet", "Owner.unmet`: no function"),
        ("def update(", "def update_more(", "unmet", "update_more`: new, and may change weights"),
        ("called(x, y=None)", "called(x, y=None, z=0)", "tolerated", "called"),
        ("request, flag=0", "request, flag=0, z=0", "tolerated", "loose"),
    ],
)
def test_a_change_is_reported(make: Make, old: str, new: str, kind: str, said: str) -> None:
    found = changes(make("0.5.3", old, new), make("0.5.2"))
    assert any(each == kind and said in line for each, line in found), found
    if old != "class Owner":  # all that is in it goes as well
        assert len(found) == 1, found


def test_what_a_tested_version_has_is_no_change(make: Make) -> None:
    edits = {"self.kept": "self.other", "def called": "def new", "unmet(self, x": "unmet(self, y"}
    for old, new in edits.items():
        base = make("0.5.1")
        assert changes(make("0.5.2", old, new), base)
        assert changes(make("0.5.2", old, new), base, make("0.5.3", old, new)) == []
        # a version is not compared with itself
        assert changes(make("0.5.3", old, new), base, make("0.5.3", old, new))


def test_a_version_alone_is_compared_with_nothing(make: Make) -> None:
    with pytest.raises(SystemExit, match=r"has SGLang 0\.5\.1 alone: name another version"):
        changes(make("0.5.1"), make("0.5.1"))


@pytest.fixture(scope="module")
def site_packages() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


@pytest.fixture(scope="module")
def installed(site_packages: Path) -> Sources:
    return Sources(site_packages, drift.PATHS, drift.OWNED)


def test_all_is_seen_in_the_installed_version(installed: Sources) -> None:
    assert installed.version == compat.sglang_version()
    assert installed.pins.keys() >= drift.PINS.keys()
    assert drift.PATHS.keys() - installed.shapes.keys() == set()
    unseen = {owner for owner, name in drift.OWNED if name not in installed.owned[owner]}
    # 0.5.23 makes the fields of the one, and a method of the quantization sets those of the other
    assert len(unseen - {"sglang.srt.server_args:ServerArgs"}) <= 1


def test_a_wheel_with_changes(
    installed: Sources, site_packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {
        "srt/managers/scheduler.py": ("handle_rpc_request(self, ", "handle_rpc_request(self, x, "),
        "srt/managers/io_struct.py": ("class AbortReq(", "class StopReq("),
        "METADATA": (f"\nVersion: {installed.version}", "\nVersion: 0.5.99"),
    }
    path = tmp_path / "sglang.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in installed.files.items():
            edits = [edit for file, edit in changed.items() if name.endswith(file)]
            assert all(old in text for old, _ in edits)
            wheel.writestr(name, text.replace(*edits[0]) if edits else text)
    page = tmp_path / "page.md"
    drift.main([str(path), "--base", str(site_packages), "--page", str(page)])
    text = page.read_text()
    assert text in capsys.readouterr().out
    assert "| 0.5.99 |" in text
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- `sglang.srt.managers.io_struct`: AbortReq",
        "- `sglang.srt.managers.scheduler.Scheduler.handle_rpc_request`: with `x`: "
        "sgl_fp8rl/engine/control/scheduler.py: handle_rpc",
    ]


def test_each_hook_of_the_plugin_is_known() -> None:
    targets = {target for targets in drift.HOOKED.values() for target in targets}
    assert targets - drift.our_code().hooked == set()
