"""An engine with dummy weights takes no port that another program may take while it starts."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_fp8rl.tools import ports
from sgl_fp8rl.tools.dummy_engine import dummy_engine
from sgl_fp8rl.tools.ports import Port


class Engine:
    """Stands for ``sglang.Engine``."""

    def __init__(self, **options: Any) -> None:
        self.port: int = options["nccl_port"]
        self.is_running = True

    def shutdown(self) -> None:
        self.is_running = False


def test_its_port_is_its_own_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine))
    with dummy_engine("some/model", 1) as engine:
        monkeypatch.setattr(ports, "FIRST", engine.port)
        monkeypatch.setattr(ports, "LAST", engine.port + 1)
        with pytest.raises(OSError, match="is free"):
            Port()
    assert not engine.is_running
    with Port() as again:
        assert again.number == engine.port
