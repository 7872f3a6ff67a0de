"""A port is its owner's alone until it lets go of it."""

import socket

import pytest

from sgl_fp8rl.tools import ports
from sgl_fp8rl.tools.ports import Port


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Port:
    """The only one that there is to be had."""
    port = Port()
    monkeypatch.setattr(ports, "FIRST", port.number)
    monkeypatch.setattr(ports, "LAST", port.number + 1)
    return port


def test_a_port_is_given_once(port: Port) -> None:
    with pytest.raises(OSError, match="is free"):
        Port()
    port.close()
    again = Port()
    assert again.number == port.number
    again.close()


def test_a_port_that_another_program_listens_on_is_not_given(port: Port) -> None:
    port.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))
        other.listen()
        with pytest.raises(OSError, match="is free"):
            Port()


def test_its_owner_can_listen_on_it(port: Port) -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", port.number))
        owner.listen()
    port.close()
