"""Broadcasts into a real stock engine on a CPU, over gloo."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.engines import models, stock_push, weights
from benchmarks.engines.keywords import ENGINE
from benchmarks.engines.stock_broadcast import BroadcastGroup
from sgl_fp8rl.tools.ports import Port

pytestmark = [pytest.mark.engine, pytest.mark.full]

SHAPE = models.Shape(256, 256, 2, 2, 2, vocab=2048)
SMALL, WHOLE = 1 << 18, 1 << 30
"""Bytes of a bucket."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    sglang = pytest.importorskip("sglang")
    models.save_config(SHAPE, tmp_path)
    port = Port()
    small = {"device": "cpu", "max_total_tokens": 2048, "mem_fraction_static": 0.3}
    small |= {"nccl_port": port.number}
    engine = sglang.Engine(model_path=str(tmp_path), **ENGINE | small)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield engine
    dist.destroy_process_group()
    engine.shutdown()
    port.close()


def test_an_engine_loads_what_is_broadcast(engine: Any) -> None:
    """The logprobs are those of the same weights by SGLang's other path."""
    dummy, _ = stock_push.probe(engine)
    group = BroadcastGroup(engine, 1, "gloo")
    named = [(n, t.detach()) for n, t in weights.hf_named(weights.bf16_module(SHAPE, "cpu"))]
    weights.renew(tensor for _, tensor in named)
    with stock_push.session(engine):
        for bucket, last in stock_push.buckets(named, SMALL):
            group.send(bucket, last, "update 1")
    found, _ = stock_push.probe(engine)
    assert found != dummy
    group.close()
    stock_push.flush(engine)  # it is idle then
    with stock_push.session(engine):
        for bucket, last in stock_push.buckets(named, WHOLE):
            stock_push.send(engine, bucket, last, "the same again")
    assert stock_push.probe(engine)[0] == found
