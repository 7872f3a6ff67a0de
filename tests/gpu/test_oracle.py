"""Logprobs of engines beside an oracle outside of the plugin, at the batches that are measured.

The oracle is transformers in FP32 with FP8 linears (``tests/logprob_oracle.py``). The control is
the same with gate and up of one layer exchanged. ``test_two_ranks_oracle.py`` has TP 2.
"""

from pathlib import Path

import pytest

from tests.gpu.beside_oracle import FP8_KV, assert_near, config_of, samples, start
from tests.gpu.conftest import Record
from tests.gpu.engines import together
from tests.gpu.policies import draw
from tests.gpu.sizes import HERE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

BOUNDS = {"BF16 KV": 0.4, "FP8 KV": 0.45, "experts, FP8 KV": 0.27}
"""Of the mean |difference|, in nats. Healthy on an H200: at most 0.303, 0.351 and 0.203; the
control at least 2.27, 2.30 and 1.00."""


def test_all_layers_of_a_dense_model(tmp_path: Path, record_property: Record) -> None:
    """With a BF16 and with an FP8 KV cache."""
    config = config_of(HERE.whole, tmp_path / "config")
    with together(
        lambda: start(tmp_path / "bf16.log", config, **HERE.bf16_kv),
        lambda: start(tmp_path / "fp8.log", config, **FP8_KV),
    ) as servers:
        policy = draw(HERE.whole, 0, HERE.device)
        sampled = {}
        for server, kind in zip(servers, ("BF16 KV", "FP8 KV"), strict=True):
            sampled |= samples(server, HERE.whole, policy, kind)
    assert_near(config, policy, sampled, BOUNDS, record_property)


def test_experts_with_an_fp8_kv_cache(tmp_path: Path, record_property: Record) -> None:
    config = config_of(HERE.moe, tmp_path / "config")
    policy = draw(HERE.moe, 0, HERE.device)
    with start(tmp_path / "server.log", config, **FP8_KV) as server:
        sampled = samples(server, HERE.moe, policy, "experts, FP8 KV")
    assert_near(config, policy, sampled, BOUNDS, record_property)
