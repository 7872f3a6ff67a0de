"""``sgl-fp8rl doctor``: what is installed, whether it is compatible, and whether it computes.

Checks are independent, so that a broken installation still gets a complete report. The numeric
checks compare with values computed here, not with the code under test, and each must also fail on
a planted fault.
"""

import importlib
import json
import os
import platform
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sgl_fp8rl import compat
from sgl_fp8rl.integrations import seams
from sgl_fp8rl.tables import align

if TYPE_CHECKING:
    from sgl_fp8rl.selftest import Float64

Status = Literal["ok", "warn", "fail", "skip"]

ENTRY_POINTS = {
    "sglang.srt.plugins": ("fp8rl", "sgl_fp8rl.engine.plugin:register"),
    "sglang.srt.platforms": ("fp8rl_cpu", "sgl_fp8rl.engine.cpu_platform:activate"),
    "verl.plugins": ("fp8rl", "sgl_fp8rl.integrations.verl.plugin"),
}
PLUGINS = {"sglang": ("SGLANG_PLUGINS", ""), "verl": ("VERL_USE_EXTERNAL_PLUGINS", "auto")}
"""The variable that selects among plugins, and its value for all of them."""
GENERIC_NAMES = ("server_args", "trainer_bridge")
_version = seams.installed


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    """What was checked, such as ``sglang``."""
    status: Status
    """``fail`` makes the exit code 1; ``skip``: could not be checked here."""
    message: str
    """One sentence: the finding and, unless it is ok, what to do."""
    detail: str = ""
    """More lines, such as a traceback; only ``--json`` prints them all."""


def run(as_json: bool = False) -> int:
    """Print the report and return the exit code: 1 if a check failed, else 0."""
    checks = run_checks()
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(render(checks))
    return int(any(check.status == "fail" for check in checks))


def run_checks() -> list[Check]:
    """All findings; a check that raises is itself a failure, with its traceback as detail."""
    found: list[Check] = []
    for name, probe in PROBES.items():
        if name in NEED_SGLANG and _version("sglang") is None:
            found.append(Check(name, "skip", "sglang is not installed"))
            continue
        try:
            found.extend(probe())
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the others still report)
            problem = f"{type(error).__name__}: {error}"
            found.append(Check(name, "fail", problem, traceback.format_exc()))
    return found


def render(checks: list[Check]) -> str:
    """A plain text table and a line that counts each status."""
    table = align([(check.status, check.name, check.message) for check in checks], left=range(3))
    counts = Counter(check.status for check in checks)
    return "\n".join([table, "", ", ".join(f"{counts[name]} {name}" for name in counts)])


def check_versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    for package in ("sgl-fp8rl", "torch", "transformers"):
        version = _version(package)
        status: Status = "ok" if version else "fail" if package != "transformers" else "warn"
        yield Check(package, status, version or "not installed")
    yield _sglang_version(_version("sglang"))
    for package in ("flashinfer-python", "sglang-kernel"):
        version = _version(package)
        yield Check(package, "ok" if version else "skip", version or "not installed; GPU only")


def _sglang_version(version: str | None) -> Check:
    if version is None:
        remedy = "not installed: trainer_bridge works here, an engine does not"
        return Check("sglang", "warn", remedy)
    has_gpu = importlib.import_module("torch").cuda.is_available()
    tested = compat.GPU_TESTED_VERSIONS if has_gpu else compat.TESTED_VERSIONS
    if version in tested:
        return Check("sglang", "ok", version)
    # The symbol check determines whether an untested version works.
    where = "on a GPU" if has_gpu else "on a CPU"
    remedy = f"install {tested[-1]}, the newest tested {where}"
    return Check("sglang", "warn", f"{version} is untested {where}; {remedy}")


def check_frameworks() -> Iterator[Check]:
    """Training frameworks that are installed. What is wrong with one is not our fault: a warning
    of what its adapter needs."""
    for name, framework in seams.FRAMEWORKS.items():
        version = _version(name)
        if version is None:
            continue
        yield _framework(name, version, framework)
        if clashes := ", ".join(seams.pin_clashes(name)):
            problem = (
                f"asks for {clashes}; keep sglang, torch and transformers by "
                f"{seams.install_command(name)}, and change the others (docs/frameworks.md)"
            )
            yield Check(f"{name} pins", "warn", problem)
    for name in seams.NO_ADAPTER:
        if version := _version(name):
            remedy = "no adapter; docs/frameworks.md says why, under Without an adapter"
            yield Check(name, "skip", f"{version}: {remedy}")


def _framework(name: str, version: str, framework: seams.Framework) -> Check:
    remedy = f"install {framework.version}: {seams.install_command(name)}"
    if missing := seams.missing_symbols(framework.symbols):
        return Check(name, "warn", f"{version} lacks {', '.join(missing)}; {remedy}")
    if absent := [need for need in framework.needs if _version(need) is None]:
        remedy = f"{', '.join(absent)} not installed; install what it needs (docs/frameworks.md)"
        return Check(name, "warn", f"{version}: {remedy}")
    if version != framework.version:
        return Check(name, "warn", f"{version} has the symbols, but is untested; {remedy}")
    count = len(framework.symbols)
    return Check(name, "ok", f"{version}: {count} of {count} symbols found")


def check_entry_points() -> Iterator[Check]:
    """Whether SGLang and verl find ours; that of verl is not loaded, which would import verl."""
    importlib.import_module("sglang")  # as in an engine, where SGLang loads us
    for group, (name, target) in ENTRY_POINTS.items():
        owner = group.partition(".")[0]
        if _version(owner) is not None:
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
    """Whether SGLang resolves the quantization ``fp8rl`` to ours."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    quantization = importlib.import_module("sglang.srt.layers.quantization")
    found = quantization.get_quantization_config("fp8rl")
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


def check_device() -> Iterator[Check]:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield _cpu_platform()
        return
    driver = _driver_version()
    chosen = importlib.import_module("sgl_fp8rl.options").read_options().format
    format_ = importlib.import_module("sgl_fp8rl.formats").CHOICES[chosen]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)}, SM {capability[0]}.{capability[1]}, {driver}"
        label = f"device cuda:{index}"
        if refused := format_.why_not_on(capability):
            others = importlib.import_module("sgl_fp8rl.formats").CHOICES.items()
            able = [option for option, other in others if not other.why_not_on(capability)]
            remedy = f"set FP8RL_FORMAT={able[-1]}" if able else "use another GPU"
            yield Check(label, "fail", f"{name}: {refused}; {remedy}")
        elif capability[0] != 9:
            yield Check(label, "warn", f"{name}: {chosen}, but untested; tested is SM 9.0")
        else:
            yield Check(label, "ok", f"{name}: kernels for {chosen}")


def check_kv_cache() -> Iterator[Check]:
    """Which attention backends ``--kv-cache-dtype fp8_e4m3`` would get here."""
    backends = importlib.import_module("sgl_fp8rl.kv_cache.backends")
    chosen = backends.choose({}, backends.capability())
    both = chosen["attention_backend"]
    decode = chosen.get("decode_attention_backend", both)
    prefill = chosen.get("prefill_attention_backend", both)
    reason = backends.BACKENDS[decode].reason
    yield Check("FP8 KV cache", "ok", f"prefill {prefill}, decode {decode}: {reason}")


def _cpu_platform() -> Check:
    if _version("sglang") is None:
        return Check("device", "ok", "no CUDA GPU: FP8 arithmetic by the torch reference")
    importlib.import_module("sglang")
    ours = importlib.import_module("sgl_fp8rl.engine.cpu_platform")
    if ours.is_active():
        return Check("device", "ok", "no CUDA GPU: SGLang runs on our CPU platform, for tests")
    if ours.activate() is None:
        remedy = "unset SGLANG_USE_CPU_ENGINE, or set SGLANG_PLATFORM=fp8rl_cpu"
        return Check("device", "warn", f"no CUDA GPU, and our CPU platform is inactive; {remedy}")
    return Check("device", "fail", "no CUDA GPU, and SGLang failed to load our CPU platform")


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "driver unknown"
    return f"driver {answer.stdout.split()[0]}" if answer.stdout.split() else "driver unknown"


def check_shadowing() -> Iterator[Check]:
    """Whether another module shadows our two generic top-level names."""
    home = Path(__file__).resolve().parent.parent
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


def check_numerics() -> Iterator[Check]:
    """Quantize and update a weight whose result is known exactly, on each kind of device."""
    torch = importlib.import_module("torch")
    selftest = importlib.import_module("sgl_fp8rl.selftest")
    devices = ["cpu"]
    if torch.cuda.is_available():
        block_fp8 = importlib.import_module("sgl_fp8rl.formats").BLOCK_FP8
        if refused := block_fp8.why_not_on(torch.cuda.get_device_capability()):
            yield Check("block FP8 on cuda", "ok", f"not checked: {refused}")
        else:
            devices.append("cuda")
    for device in devices:
        yield _verdict(f"block FP8 on {device}", selftest.quantize_and_read(device))
        yield _verdict(f"update on {device}", selftest.update_and_read(device))


def _verdict(name: str, readings: "list[Float64]") -> Check:
    selftest = importlib.import_module("sgl_fp8rl.selftest")
    wrong = sum(map(selftest.count_wrong, readings))
    total = sum(reading.size for reading in readings)
    if wrong:
        return Check(name, "fail", f"{wrong} of {total} values are not what E4M3 gives")
    if not all(map(selftest.sees_faults, readings)):
        return Check(name, "fail", "the comparison missed a planted fault; report this as a bug")
    return Check(name, "ok", f"{total} of {total} values exact; planted faults are detected")


PROBES: dict[str, Callable[[], Iterator[Check]]] = {
    "versions": check_versions,
    "sglang symbols": check_sglang_symbols,
    "sglang updates": check_sglang_updates,
    "entry points": check_entry_points,
    "quantization fp8rl": check_registration,
    "device": check_device,
    "FP8 KV cache": check_kv_cache,
    "packages": check_shadowing,
    "frameworks": check_frameworks,
    "environment": check_environment,
    "numerics": check_numerics,
}
NEED_SGLANG = ("sglang symbols", "sglang updates", "entry points", "quantization fp8rl")
