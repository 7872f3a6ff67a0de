"""What a run's figures depend on."""

import platform
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch

PACKAGES = ("sgl-fp8rl", "sglang", "torch", "transformers")


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and date."""
    on_gpu = device.type == "cuda"
    packages = (*PACKAGES, "flashinfer-python") if on_gpu else PACKAGES
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "versions": {name: version(name) for name in packages}
        | {"python": platform.python_version()},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
