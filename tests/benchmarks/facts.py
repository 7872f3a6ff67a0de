"""The environment that benchmarks on a GPU would stamp into their files."""

from typing import Any

FACTS: dict[str, Any] = {
    "device": "NVIDIA H200",
    "count": 1,
    "driver": "580.1",
    "sglang": "0.5.17",
    "torch": "2.11.0",
    "flashinfer": "0.6.15",
    "date": "2026-01-01",
    "commit": "abc1234",
}
