"""Servers of a benchmark, on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer_bridge
from benchmarks import sharded
from benchmarks.engines import models, server, stock_push, weights
from benchmarks.engines.keywords import ENGINE
from benchmarks.engines.server import Server
from sgl_fp8rl.tools.ports import Port

pytestmark = [pytest.mark.engine, pytest.mark.full]

LIMIT_S = 240
SHAPE = models.Shape(256, 256, 2, 2, 2, vocab=2048)
ON_A_CPU = {"device": "cpu", "max_total_tokens": 2048, "mem_fraction_static": 0.3}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    pytest.importorskip("sglang")
    models.save_config(SHAPE, tmp_path)
    keywords = {**ENGINE, **ON_A_CPU, "quantization": "fp8rl"}
    port = Port()
    started = [Server(tmp_path, keywords, port.number, tmp_path / "log")]
    try:
        yield started
    finally:
        for each in started:
            each.shutdown()
            trainer_bridge.close(each.address)
        port.close()


def test_a_server_is_updated_and_serves_the_version(servers: list[Server]) -> None:
    (only,) = servers
    only.await_start()
    module = weights.bf16_module(SHAPE, "cpu")
    weights.renew(module.parameters())
    trainer_bridge.update(module, [only.address], version=3)
    logprobs, versions = sharded.logprobs(servers)
    assert len(logprobs) == len(stock_push.PROBE) - 1
    assert versions == [3] * stock_push.NEW_TOKENS


@pytest.mark.timeout(LIMIT_S)
def test_a_server_that_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    monkeypatch.setattr(server, "START_S", 2 * LIMIT_S)
    started = Server(tmp_path, {"no_such_option": True}, 1, tmp_path / "log")
    with pytest.raises(RuntimeError, match="did not start"):
        started.await_start()
    assert "no-such-option" in (tmp_path / "log").read_text()
    started.shutdown()
