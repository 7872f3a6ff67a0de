"""Logprobs of an engine beside those of an oracle that has the same policy.

An engine starts with dummy weights, so that all that it samples comes from an update.
"""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trainer_bridge
from tests.engine.harness import Server
from tests.engine.serving import version_of
from tests.gpu.engines import decoded_sizes, start_server
from tests.gpu.policies import Shape, Tensors
from tests.gpu.sizes import HERE
from tests.logprob_oracle import Reference, Sampled

PROMPT_TOKENS, NEW_TOKENS = 32, 16
FP8_KV = {"kv_cache_dtype": "fp8_e4m3"}
KV_TOKENS = 1 << 15
"""At least 256 requests in pages of 64."""
LAYER = "model.layers.0"
"""In which the control exchanges gate and up."""
WIDE = 1.5
"""Times its bound, the least distance of the control."""

Samples = dict[tuple[str, int], list[Sampled]]
"""By the kind of engine, which has a bound, and the size of the batch."""


def config_of(shape: Shape, folder: Path) -> Path:
    """A folder with the model's configuration, and no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return folder


def start(log: Path, config: Path, **flags: Any) -> Server:
    """A server without weights."""
    common = {"load_format": "dummy", "max_total_tokens": KV_TOKENS, **HERE.flags}
    return start_server(log, config, common=common, **flags)


def bring(server: Server, policy: Tensors, in_flight: str = "abort") -> int:
    """Update the server to a policy; its new version."""
    version = version_of(server) + 1
    trainer_bridge.update(policy, server, version=version, in_flight=in_flight)
    return version


def prompts_of(shape: Shape, size: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(size)
    return torch.randint(shape.vocabulary, (size, PROMPT_TOKENS), generator=random).tolist()


def samples(server: Server, shape: Shape, policy: Tensors, kind: str) -> Samples:
    """Update the server to a policy, and let it sample at every batch size."""
    version = bring(server, policy)
    found: Samples = {(kind, size): sample(server, shape, size) for size in HERE.batches}
    versions = {v for those in found.values() for one in those for v in one.versions}
    assert versions == {version}
    assert_in_graphs(server, *HERE.batches)
    return found


def sample(server: Server, shape: Shape, size: int) -> list[Sampled]:
    """Responses that are decoded together from their first token on."""
    prompts = prompts_of(shape, size)
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    # token ids reach the scheduler in one message, so no step sees only some of them
    replies = server.generate(
        {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    )
    found = []
    for prompt, reply in zip(prompts, replies, strict=True):
        meta = reply["meta_info"]
        logprobs = [token[0] for token in meta["output_token_logprobs"]]
        found.append(Sampled(prompt, reply["output_ids"], logprobs, meta["policy_version"]))
        assert len(found[-1].tokens) == len(logprobs) == NEW_TOKENS
    return found


def assert_in_graphs(server: Server, *sizes: int) -> None:
    """Batches of these sizes were decoded together, and every batch by a CUDA graph."""
    if HERE.has_graphs:
        decoded = decoded_sizes(server.log)
        assert {(size, True) for size in sizes} <= decoded
        assert all(graph for _, graph in decoded)


def swapped(policy: Tensors) -> Tensors:
    """The policy with gate and up of one layer exchanged, in every expert."""
    changed = dict(policy)
    for name, tensor in policy.items():
        if name.startswith(f"{LAYER}.mlp.") and name.endswith("gate_proj.weight"):
            other = name.replace("gate_proj", "up_proj")
            changed[name], changed[other] = policy[other], tensor
    assert changed.keys() == policy.keys()
    return changed


def mean_distances(config: Path, policy: Tensors, sampled: Samples) -> dict[str, float]:
    """Mean |difference| of logprobs from those of this policy, for each batch."""
    reference = Reference(config, policy)
    means = {
        f"{kind}, {size}": float(torch.cat(reference.distances(those)).mean())
        for (kind, size), those in sampled.items()
    }
    del reference
    gc.collect()  # its modules refer to each other, and fill a third of a GPU
    if HERE.device == "cuda":
        torch.cuda.empty_cache()
    return means


def assert_near(
    config: Path,
    policy: Tensors,
    sampled: Samples,
    bounds: dict[str, float],
    record: Callable[[str, object], None],
) -> None:
    """What was sampled is the policy's, and by far not that of the control.

    Args:
        bounds: of the mean |difference|, by kind.
        record: pytest's ``record_property``.
    """
    near = mean_distances(config, policy, sampled)
    far = mean_distances(config, swapped(policy), sampled)
    record("mean difference from the oracle, and of gate and up exchanged", (near, far))
    for (kind, _), name in zip(sampled, near, strict=True):
        assert near[name] <= bounds[kind], (near, far)
        assert far[name] > WIDE * bounds[kind], (near, far)
