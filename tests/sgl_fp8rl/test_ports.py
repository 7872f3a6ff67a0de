"""A port is its owner's alone until it lets go of it, as one that a dummy engine takes."""

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_fp8rl.tools import ports
from sgl_fp8rl.tools.layers import dummy_engine
from sgl_fp8rl.tools.ports import Port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    """The only one that there is to be had."""
    port = Port()
    monkeypatch.setattr(ports, "FIRST", port.number)
    monkeypatch.setattr(ports, "LAST", port.number + 1)
    return port


def test_a_port_is_its_owners_alone(port: Port) -> None:
    """Who can listen on it, until it is closed; and not while another program listens on it."""
    with pytest.raises(OSError, match="is free"):
        Port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port.number))
        listener.listen()
        port.close()
        with pytest.raises(OSError, match="is free"):
            Port()
    again = Port()
    assert again.number == port.number
    again.close()


class Engine:
    """Stands for ``sglang.Engine``."""

    def __init__(self, **options: Any) -> None:
        self.port: int = options["nccl_port"]
        self.is_running = True

    def shutdown(self) -> None:
        self.is_running = False


def test_the_port_of_a_dummy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=Engine))
    with dummy_engine("some/model", 1) as engine:
        monkeypatch.setattr(ports, "FIRST", engine.port)
        monkeypatch.setattr(ports, "LAST", engine.port + 1)
        with pytest.raises(OSError, match="is free"):
            Port()
    assert not engine.is_running
    with Port() as again:
        assert again.number == engine.port
