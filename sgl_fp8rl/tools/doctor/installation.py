"""What is installed, whether it is compatible, and whether the right files are found.

Checks are independent, so that a broken installation still gets a complete report.
"""

import importlib
import os
import platform
import traceback
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from sgl_fp8rl.engine import compat
from sgl_fp8rl.tools.doctor import check
from sgl_fp8rl.tools.doctor.check import Check, Status

ENTRY_POINTS = {
    "sglang.srt.plugins": ("fp8rl", "sgl_fp8rl.engine.plugin:register"),
    "sglang.srt.platforms": ("fp8rl_cpu", "sgl_fp8rl.engine.cpu.cpu_platform:activate"),
    "verl.plugins": ("fp8rl", "sgl_fp8rl.verl.plugin"),
}
PLUGINS = {"sglang": ("SGLANG_PLUGINS", ""), "verl": ("VERL_USE_EXTERNAL_PLUGINS", "auto")}
"""The variable that selects among plugins, and its value for all of them."""
GENERIC_NAMES = ("server_args", "trainer_bridge")


def check_versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    for package in ("sgl-fp8rl", "torch", "transformers"):
        version = check.installed(package)
        status: Status = "ok" if version else "fail" if package != "transformers" else "warn"
        yield Check(package, status, version or "not installed")
    yield _sglang_version(check.installed("sglang"))
    for package in ("flashinfer-python", "sglang-kernel"):
        version = check.installed(package)
        yield Check(package, "ok" if version else "skip", version or "not installed; GPU only")


def _sglang_version(version: str | None) -> Check:
    if version is None:
        remedy = "not installed: trainer_bridge works here, an engine does not"
        return Check("sglang", "warn", remedy)
    if version in compat.TESTED_VERSIONS:
        return Check("sglang", "ok", version)
    # The symbol check determines whether an untested version works.
    remedy = f"install {compat.TESTED_VERSIONS[-1]}, the newest tested one"
    return Check("sglang", "warn", f"{version} is untested; {remedy}")


def check_entry_points() -> Iterator[Check]:
    """Whether SGLang and verl find ours; that of verl is not loaded, which would import verl."""
    importlib.import_module("sglang")  # as in an engine, where SGLang loads us
    for group, (name, target) in ENTRY_POINTS.items():
        owner = group.partition(".")[0]
        if check.installed(owner) is not None:
            yield _entry_point(f"entry point {name} of {owner}", owner, group, name, target)


def _entry_point(label: str, owner: str, group: str, name: str, target: str) -> Check:
    found = [point for point in metadata.entry_points(group=group) if point.name == name]
    if [point.value for point in found] != [target]:
        values = ", ".join(point.value for point in found) or "nothing"
        problem = f"{group} has {values} under this name, not {target}; reinstall sgl-fp8rl"
        return Check(label, "fail", problem)
    variable, everything = PLUGINS[owner]
    chosen = os.environ.get(variable, everything).strip()
    if chosen != everything and name not in [part.strip() for part in chosen.split(",")]:
        return Check(label, "fail", f"{variable}={chosen} leaves it out; add {name}")
    try:
        if owner == "sglang":
            found[0].load()
    except (ImportError, AttributeError, compat.IncompatibleSGLangError) as error:
        problem = f"{target} cannot be loaded: {type(error).__name__}: {error}"
        return Check(label, "fail", problem, traceback.format_exc())
    return Check(label, "ok", f"{target} in {group}")


def check_registration() -> Iterator[Check]:
    """Whether SGLang resolves the quantization ``fp8rl`` to ours, and that can start."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    quantization = importlib.import_module("sglang.srt.layers.quantization")
    found = quantization.get_quantization_config("fp8rl")
    importlib.import_module("sgl_fp8rl.engine.startup.activate").activate()
    path = f"{found.__module__}.{found.__qualname__}"
    is_ours = path.startswith("sgl_fp8rl.")
    yield Check("quantization fp8rl", "ok" if is_ours else "fail", f"SGLang resolves it to {path}")


def check_sglang_symbols() -> Iterator[Check]:
    importlib.import_module("sglang")
    symbols = [*compat.check_symbols(), *compat.check_attributes()]
    missing = [symbol for symbol, is_found in symbols if not is_found]
    if missing:
        problem = f"{len(missing)} of {len(symbols)} missing: {', '.join(missing)}"
        yield Check("sglang symbols", "fail", problem)
    else:
        yield Check("sglang symbols", "ok", f"{len(symbols)} of {len(symbols)} found")


def check_sglang_updates() -> Iterator[Check]:
    """Whether SGLang has a way to change weights that an fp8rl engine neither knows nor refuses."""
    importlib.import_module("sglang")
    unknown = compat.unknown_updates()
    if unknown:
        problem = f"{', '.join(unknown)}: new in SGLang, not refused by an fp8rl engine; do not use"
        yield Check("sglang updates", "warn", problem)
    else:
        yield Check("sglang updates", "ok", "each way to change weights is refused or quarantines")


def check_shadowing() -> Iterator[Check]:
    """Whether another module shadows our two generic top-level names."""
    home = Path(__file__).resolve().parents[3]
    for name in GENERIC_NAMES:
        label = f"package {name}"
        module = importlib.import_module(name)
        actual = Path(module.__file__ or "").resolve()
        expected = home / name / "__init__.py"
        local = Path.cwd() / f"{name}.py"
        if actual != expected:
            yield Check(label, "fail", f"{actual} shadows {expected}; rename or remove it")
        elif local.exists():
            yield Check(label, "warn", f"{local} shadows ours for scripts run there; rename it")
        else:
            yield Check(label, "ok", str(actual.parent))


def check_environment() -> Iterator[Check]:
    """Whether all ``FP8RL_*`` variables are known and readable."""
    server_args = importlib.import_module("server_args")
    options = importlib.import_module("sgl_fp8rl.options").read_options()
    known = {server_args.env_name(option.name) for option in fields(options)}
    given = {name for name in os.environ if name.startswith("FP8RL_")}
    if given - known:
        unknown = ", ".join(sorted(given - known))
        yield Check("environment", "warn", f"{unknown}: unknown, has no effect; check the spelling")
    else:
        message = f"{', '.join(sorted(given & known)) or 'no FP8RL_* variable'} set"
        yield Check("environment", "ok", message)
