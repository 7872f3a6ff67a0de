"""The report: every check runs, and one that raises is a finding too."""

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict

from sgl_fp8rl.tables import align
from sgl_fp8rl.tools.doctor import check
from sgl_fp8rl.tools.doctor.check import Check
from sgl_fp8rl.tools.doctor.device import check_device, check_kv_cache, check_numerics
from sgl_fp8rl.tools.doctor.installation import (
    check_entry_points,
    check_environment,
    check_registration,
    check_sglang_symbols,
    check_sglang_updates,
    check_shadowing,
    check_versions,
)

PROBES: dict[str, Callable[[], Iterator[Check]]] = {
    "versions": check_versions,
    "sglang symbols": check_sglang_symbols,
    "sglang updates": check_sglang_updates,
    "entry points": check_entry_points,
    "quantization fp8rl": check_registration,
    "device": check_device,
    "FP8 KV cache": check_kv_cache,
    "packages": check_shadowing,
    "environment": check_environment,
    "numerics": check_numerics,
}
NEED_SGLANG = ("sglang symbols", "sglang updates", "entry points", "quantization fp8rl")


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
        if name in NEED_SGLANG and check.installed("sglang") is None:
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
