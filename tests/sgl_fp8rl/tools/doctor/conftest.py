"""SGLang as far as the doctor looks for it, without its import."""

import sys
import types

import pytest

from sgl_fp8rl.tools.doctor import check


@pytest.fixture
def sglang_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    monkeypatch.setattr(check, "installed", lambda package: "0.5.17")
