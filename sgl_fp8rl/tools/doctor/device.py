"""What this machine can run: kernels for the format, attention backends, and exact numerics.

The numeric checks compare with values computed here, not with the code under test, and each must
also fail on a planted fault.
"""

import importlib
import subprocess
from collections.abc import Iterator
from itertools import product

from sgl_fp8rl.tools.doctor import check
from sgl_fp8rl.tools.doctor.check import Check


def check_device() -> Iterator[Check]:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield _cpu_platform()
        return
    driver = _driver_version()
    chosen = importlib.import_module("sgl_fp8rl.options").read_options().format
    format_ = importlib.import_module("sgl_fp8rl.formats").FORMATS[chosen]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)}, SM {capability[0]}.{capability[1]}, {driver}"
        label = f"device cuda:{index}"
        if refused := format_.why_not_on(capability):
            yield Check(label, "fail", f"{name}: {refused}; use another GPU")
        elif capability[0] != 9:
            yield Check(label, "warn", f"{name}: {chosen}, but untested; tested is SM 9.0")
        else:
            yield Check(label, "ok", f"{name}: kernels for {chosen}")


def _cpu_platform() -> Check:
    if check.installed("sglang") is None:
        return Check("device", "ok", "no CUDA GPU: FP8 arithmetic by the torch reference")
    importlib.import_module("sglang")
    ours = importlib.import_module("sgl_fp8rl.engine.cpu.cpu_platform")
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


def check_kv_cache() -> Iterator[Check]:
    """Which attention backends ``--kv-cache-dtype fp8_e4m3`` would get here."""
    backends = importlib.import_module("sgl_fp8rl.engine.attention.backends")
    chosen = backends.choose({}, backends.capability())
    both = chosen["attention_backend"]
    decode = chosen.get("decode_attention_backend", both)
    prefill = chosen.get("prefill_attention_backend", both)
    reason = backends.BACKENDS[decode].reason
    yield Check("FP8 KV cache", "ok", f"prefill {prefill}, decode {decode}: {reason}")


def check_numerics() -> Iterator[Check]:
    """Quantize and update a weight whose result is known exactly, on each kind of device."""
    torch = importlib.import_module("torch")
    selftest = importlib.import_module("sgl_fp8rl.tools.doctor.selftest")
    devices = ["cpu"]
    if torch.cuda.is_available():
        block_fp8 = importlib.import_module("sgl_fp8rl.formats").BLOCK_FP8
        if refused := block_fp8.why_not_on(torch.cuda.get_device_capability()):
            yield Check("block FP8 on cuda", "ok", f"not checked: {refused}")
        else:
            devices.append("cuda")
    reads = {"block FP8": selftest.quantize_and_read, "update": selftest.update_and_read}
    for device, (what, read) in product(devices, reads.items()):
        name = f"{what} on {device}"
        try:
            readings = read(device)
        except ValueError as error:  # what was quantized is finite
            yield Check(name, "fail", f"the values are not what E4M3 gives: {error}")
            continue
        wrong = sum(map(selftest.count_wrong, readings))
        total = sum(reading.size for reading in readings)
        if wrong:
            yield Check(name, "fail", f"{wrong} of {total} values are not what E4M3 gives")
        elif not all(map(selftest.sees_faults, readings)):
            problem = "the comparison missed a planted fault; report this as a bug"
            yield Check(name, "fail", problem)
        else:
            told = f"{total} of {total} values exact; planted faults are detected"
            yield Check(name, "ok", told)
