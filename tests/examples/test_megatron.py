"""The example of Megatron: two ranks with tensor parallelism update a server."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.trl import tiny_model
from tests.engine import expected, models
from tests.engine.harness import FORKED, Server
from tests.engine.test_updates import sha256
from tests.examples.test_demo import run

try:
    import mbridge  # noqa: F401
except (ImportError, OSError) as error:  # megatron-core loads a CUDA library that 0.5.23 brings
    pytest.skip(f"mbridge cannot be imported: {error}", allow_module_level=True)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_ranks_walk_their_export_into_a_server(tmp_path: Path) -> None:
    start = tiny_model.save(tmp_path / "start", seed=1)
    policy = tiny_model.save(tmp_path / "policy")
    with Server(tmp_path / "log", FORKED, start) as server:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        out = run(*ranks, "-m", "examples.megatron.update", str(policy), server.address)
        held = sha256(server.control({"op": "digest"})["ranks"])
    assert [f"tokens of version [{step}]" in out for step in range(3)] == [True, True, False]
    assert held == expected.digests(halved(policy, tmp_path / "halved"), 1)


def halved(policy: Path, folder: Path) -> Path:
    """The policy after one step of the example."""
    folder.mkdir()
    tensors = {name: tensor / 2 for name, tensor in models.named_tensors(policy)}
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    save_file(tensors, folder / models.WEIGHTS)
    return folder
