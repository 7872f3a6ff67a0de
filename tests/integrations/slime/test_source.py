"""The updater with slime's own iterator and converters, where slime's source is on the path.

    PYTHONPATH=path/to/slime python -m pytest tests/integrations/slime/test_source.py

It was written for slime 0.3.1 (THUDM/slime, commit 624b824), which no package index has.
"""

import json
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine import expected, models
from tests.engine.harness import FORKED, Server
from tests.engine.test_updates import sha256
from tests.integrations.slime import frameworks
from tests.trainer_bridge import ranks
from trainer_bridge.engines.engine_client import connect

pytest.importorskip("slime.backends")
pytest.importorskip("mbridge")
pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

WORLD = 2
COLLECTIVE_TIMEOUT_S, JOIN_S = 300.0, 480.0
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
"""Ranks of tensor, pipeline and expert parallelism, one layout for each policy."""


class Wrapped(nn.Module):
    """A model under the prefix of its names in slime, with its configuration."""

    def __init__(self, view: nn.Module, config: Any) -> None:
        super().__init__()
        self.module, self.config = view, config


def train(rank: int, folder: Path, *, address: str, later: list[Path]) -> None:
    accelerator: Any = import_module("slime.utils.accelerator")
    accelerator.current_device, accelerator.synchronize = lambda: "cpu", lambda: None
    import_module("slime.utils.distributed_utils").init_gloo_group()
    # the actor's module needs Ray, and all that it holds for us is the class
    actor = "slime.backends.megatron_utils.actor"
    sys.modules[actor] = frameworks.modules("slime")[actor]

    for version, (policy, layout) in enumerate(zip(later, LAYOUTS, strict=True), 1):
        model = loaded(policy, layout)
        args = options(address, policy, model.config)
        weights = partial(weights_of, args, model)
        updater = frameworks.start("slime", args, weights, model, model_name="qwen3moeconfig")
        updater.weight_version = version - 1
        updater.connect_rollout_engines([object()], object())
        updater.update_weights()
        if rank == 0:
            digest = connect(address).control({"op": "digest"})["ranks"]
            (folder / f"{version}.json").write_text(json.dumps(digest))
        dist.barrier()


def weights_of(args: Namespace, model: Wrapped) -> dict[str, torch.Tensor]:
    """This rank's, by slime's global names."""
    common: Any = import_module("slime.backends.megatron_utils.update_weight.common")
    return dict(common.named_params_and_buffers(args, [model]))


def loaded(policy: Path, layout: tuple[int, int, int]) -> Wrapped:
    """This rank's shard of a policy."""
    from examples.megatron import cpu_model

    _, view = cpu_model.load(policy, cpu_model.Layout(*layout))
    dist.barrier()
    return Wrapped(view, view.config)


def options(address: str, policy: Path, config: Any) -> Namespace:
    model = {
        "num_experts": config.num_moe_experts,
        "vocab_size": json.loads((policy / "config.json").read_text())["vocab_size"],
        "q_lora_rank": None,
        "kv_channels": config.kv_channels,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "mtp_num_layers": None,
    }
    host_and_port = address.removeprefix("http://")
    return frameworks.options("slime", [host_and_port], hf_checkpoint=str(policy), **model)


def test_slimes_iterator_leaves_the_bytes_of_each_policy(tmp_path: Path) -> None:
    start = models.make_checkpoint("qwen3_moe", tmp_path / "start")
    later = [models.perturb(start, tmp_path / f"policy {n}", n) for n in range(1, len(LAYOUTS) + 1)]
    with Server(tmp_path / "server.log", FORKED, start) as server:
        worker = partial(train, address=server.address, later=later)
        ranks.run(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, JOIN_S)
    for version, (policy, layout) in enumerate(zip(later, LAYOUTS, strict=True), 1):
        held = sha256(json.loads((tmp_path / f"{version}.json").read_text()))
        assert held == expected.digests(policy, 1), layout
