"""What the wheel holds: three packages, type markers, our tables and entry points, nothing else."""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sgl_fp8rl.engine import compat

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"server_args", "sgl_fp8rl", "trainer_bridge"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy, so that no build folder of the checkout leaks into it."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=unwanted)
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("sgl_fp8rl-*.whl")
    return zipfile.ZipFile(path)


def dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".json", ".cu") or path.name == "py.typed"
    }
    packed = {path for path in wheel.namelist() if ".dist-info/" not in path}
    assert packed == expected >= {f"{package}/py.typed" for package in PACKAGES}
    names = {path.partition("/")[0] for path in wheel.namelist()}
    (metadata_folder,) = names - PACKAGES
    assert names > PACKAGES and re.fullmatch(r"sgl_fp8rl-.*\.dist-info", metadata_folder)


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(dist_info(wheel, "entry_points.txt"))
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"sgl-fp8rl": "sgl_fp8rl.tools.cli:main"},
        "sglang.srt.plugins": {"fp8rl": "sgl_fp8rl.engine.plugin:register"},
        "sglang.srt.platforms": {"fp8rl_cpu": "sgl_fp8rl.engine.cpu.cpu_platform:activate"},
        "verl.plugins": {"fp8rl": "sgl_fp8rl.verl.plugin"},
    }


def test_the_newest_tested_sglang_and_the_licence(wheel: zipfile.ZipFile) -> None:
    lines = dist_info(wheel, "METADATA").splitlines()
    (extra,) = (line for line in lines if line.startswith("Requires-Dist: sglang"))
    assert extra.partition(";")[0] == f"Requires-Dist: sglang=={compat.TESTED_VERSIONS[-1]}"
    assert "License-Expression: Apache-2.0" in lines
    assert "Apache License" in dist_info(wheel, "licenses/LICENSE")
