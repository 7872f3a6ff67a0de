"""What of verl's rollout configuration is refused, and how the key reaches SGLang."""

from typing import Any

import pytest

from sgl_fp8rl.verl.rollout_config import SAMPLING_OFF, check, hand_over, is_ours
from trainer_bridge.adapters.contract import check_refusals


class Config:
    """As verl's: read by ``get`` or by attribute, and frozen."""

    def __init__(self, backend: str = "naive", **fields: Any) -> None:
        vars(self).update(fields, checkpoint_engine=type("C", (), {"backend": backend}))

    def get(self, name: str) -> Any:
        return getattr(self, name, None)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def test_what_cannot_be_honoured_is_refused() -> None:
    off = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    for config in (Config(), Config(**off), Config(top_k=0), Config(backend="nccl")):
        check(config)
    with pytest.raises(ValueError, match="delta_sharded"):
        check(Config(backend="delta_sharded"))


def test_sampling_that_changes_logprobs_is_refused() -> None:
    check_refusals(lambda options: check(Config(**options)), SAMPLING_OFF)


@pytest.mark.parametrize("given", [None, {}, {"sglang": None}, {"sglang": {"tp_size": 1}}])
def test_the_key_becomes_an_argument_of_sglang(given: Any) -> None:
    config = Config(quantization="fp8rl", engine_kwargs=given)
    assert is_ours(config)
    hand_over(config)
    kept = (given or {}).get("sglang") or {}
    assert config.get("engine_kwargs") == {"sglang": {**kept, "quantization": "fp8rl"}}
    assert config.get("quantization") is None
    assert given in (None, {}, {"sglang": None}, {"sglang": {"tp_size": 1}})  # not written into
    assert not any(is_ours(Config(quantization=other)) for other in (None, "fp8"))


def test_our_lists_become_tuples() -> None:
    """As our options have them; what is SGLang's stays as it is."""
    given = {"sglang": {"fp8rl_ignored_layers": ["re:.*mlp.*"], "cuda_graph_bs": [1, 2]}}
    config = Config(quantization="fp8rl", engine_kwargs=given)
    hand_over(config)
    sglang = config.get("engine_kwargs")["sglang"]
    assert sglang["fp8rl_ignored_layers"] == ("re:.*mlp.*",)
    assert sglang["cuda_graph_bs"] == [1, 2]
