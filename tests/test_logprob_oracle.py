"""The oracle of logprobs rounds as the oracle of bytes, and finds the place of each expert."""

from dataclasses import replace
from pathlib import Path

import torch

from tests import oracle
from tests.gpu.policies import MOE, draw, write_checkpoint
from tests.logprob_oracle import Reference, fake_quantize

TINY = replace(MOE, hidden=256, intermediate=128, kv_heads=2, heads=4, experts=16, vocabulary=512)
ROUNDED = 0.05
"""Of logprobs in FP32. What two exchanged experts change is more."""


def test_weights_are_rounded_as_by_the_oracle_of_bytes() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0
    wanted = oracle.dequantize_weight(*oracle.quantize_weight(weight.numpy()))
    assert torch.equal(fake_quantize(weight, 128), torch.from_numpy(wanted).float())
    assert not torch.equal(fake_quantize(weight, 1), fake_quantize(weight, 128))


def test_experts_lie_where_transformers_reads_them(tmp_path: Path) -> None:
    """Two that are exchanged are seen, and not where the router is changed alike."""
    policy = draw(TINY, 0, "cpu")
    config = write_checkpoint(TINY, policy, tmp_path / "0")
    prompt = torch.randint(TINY.vocabulary, (64,), generator=torch.Generator().manual_seed(1))
    plain = Reference(config, policy)
    (wanted,) = plain.logprobs([prompt.tolist()])
    experts = "model.layers.0.mlp.experts"
    mixed = dict(policy)
    for part in ("gate", "up", "down"):
        one, other = (f"{experts}.{expert}.{part}_proj.weight" for expert in (0, 1))
        mixed[one], mixed[other] = mixed[other], mixed[one]
    (changed,) = Reference(config, mixed).logprobs([prompt.tolist()])
    assert (changed - wanted).abs().max() > ROUNDED
    router = "model.layers.0.mlp.gate.weight"
    mixed[router] = policy[router][[1, 0, *range(2, TINY.experts)]]
    (same,) = Reference(config, mixed).logprobs([prompt.tolist()])
    torch.testing.assert_close(same, wanted, atol=ROUNDED / 100, rtol=0)
