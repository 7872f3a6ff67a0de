"""The record of soaks: each kind's last one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.soak import report


def of(device: str, **fields: Any) -> dict[str, Any]:
    difference = {
        "mean": 0.1,
        "largest": 1.0,
        "largest segment mean": 0.2,
        "control mean": 9.0,
        "control told apart": 0.9,
    }
    return {
        "SGLang": "0.5.17",
        "device": device,
        "machine": "a machine",
        "commit": "abc1234",
        "date": "2026-01-01",
        "seed": 0,
        "seconds": 61,
        "result": "passed",
        "updates": 1000,
        "faults": {},
        "impossible": [],
        "heals": 0,
        "quarantines": 0,
        "tokens": 5,
        "mixed tokens": 0,
        "sequences of several versions": 0,
        "requests refused in quarantine": 0,
        "difference": difference,
        "bounds": {"token": 4.0, "segment": 1.0},
        "growth": {},
        "series": {"updates": [1, 2]},
        "samples": [1, 2],
        **fields,
    }


def test_each_kind_keeps_its_last_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "REPORTS", tmp_path / "reports.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    report.record([of("cuda", updates=200)])
    report.record([of("cpu", updates=7), of("cpu", SGLang="0.5.23")])
    report.record([of("cpu", updates=900)])
    page = (tmp_path / "page.md").read_text()
    assert "| updates | 900 | 1000 | 200 |" in page
    assert "| SGLang | 0.5.17 | 0.5.23 | 0.5.17 |" in page
    kept = (tmp_path / "reports.json").read_text()
    assert "samples" not in kept
    assert '"updates": [1,2]' in kept
    assert json.loads(kept)["cpu 0.5.17"]["series"] == {"updates": [1, 2]}
