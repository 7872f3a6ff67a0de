"""Loading a BF16 checkpoint: what device memory it takes, and which backends are refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl.engine.layers.linear import keep_storage
from tests.gpu.conftest import Record
from tests.gpu.engines import (
    BUCKET_BYTES,
    digest_of,
    nbytes_of,
    sha256,
    start_engine,
    start_server,
    storage,
    update,
    used_bytes,
)
from tests.gpu.policies import (
    DENSE,
    LARGE,
    draw,
    reference_digests,
    shared_folder,
    write_checkpoint,
)

pytestmark = pytest.mark.gpu

SHARD_BYTES = 512 << 20  # a layer is 368 MiB, the embedding and the head 256 MiB each
BESIDE_BYTES = 512 << 20
"""What a load takes beside weights: kernels, their workspaces, torch's rounding of allocations."""
POLL_S = 1e-3
BEGIN, END = "Load weight begin", "Load weight end"
"""What SGLang logs before and after its loader; the KV cache is allocated after the second."""
SENTENCE = "repacks weights, which in-place updates cannot follow"


# ---- memory --------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Device memory in use by all processes while an engine starts, in bytes."""

    log: Path
    before: int | None = None
    """At the last look before the load began: with the engine's CUDA context."""
    peak: int = 0
    """Until the load ended."""
    looks: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(POLL_S):
            used = used_bytes()
            # read after the look: what was seen then was there before the line was written
            text = self.log.read_text(errors="replace") if self.log.exists() else ""
            if END in text:
                return
            if BEGIN not in text:
                self.before = used
            else:
                self.peak = max(self.peak, used)
                self.looks += 1

    @classmethod
    @contextmanager
    def over(cls, log: Path) -> Iterator["Watch"]:
        used_bytes()  # this process's own context, before the first look
        watch = cls(log)
        thread = threading.Thread(target=watch.run)
        thread.start()
        try:
            yield watch
        finally:
            watch._stop.set()
            thread.join()


@pytest.mark.alone
def test_peak_memory_of_a_load(tmp_path: Path, record_property: Record) -> None:
    """At most the FP8 model, one shard and the bucket: the BF16 model is never whole there."""
    policy = draw(LARGE, 0)
    in_bf16 = sum(tensor.nbytes for tensor in policy.values())
    log = tmp_path / "server.log"
    with shared_folder() as folder:
        checkpoint = write_checkpoint(LARGE, policy, folder / "0", SHARD_BYTES)
        shards = [file.stat().st_size for file in checkpoint.glob("*.safetensors")]
        assert len(shards) > 4
        wanted = reference_digests(policy)
        del policy
        torch.cuda.empty_cache()
        with (
            Watch.over(log) as watch,
            # with graphs a start also measures kernels where no table ships for its libraries
            start_server(log, checkpoint, cuda_graph_backend_decode="disabled") as server,
        ):
            digest = digest_of(server)
    assert watch.before is not None
    assert watch.looks > 20  # it was watched, not missed
    assert sha256(digest) == wanted
    model = nbytes_of(digest)
    taken = watch.peak - watch.before
    record_property("bytes", {"taken": taken, "fp8": model, "bf16": in_bf16, "looks": watch.looks})
    limit = model + max(shards) + BUCKET_BYTES + BESIDE_BYTES
    assert limit < in_bf16  # the limit tells this from a load of the whole BF16 model
    # SGLang's own account of what stays tells a peak from what the engine keeps
    told = [line for line in log.read_text().splitlines() if BEGIN in line or END in line]
    assert model <= taken <= limit, (taken, model, limit, told)


# ---- storage -------------------------------------------------------------------------------------


def test_layout_of_what_is_loaded_and_updated(tmp_path: Path) -> None:
    """Codes and FP32 block scales where updates and graphs look for them, after both."""
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, draw(DENSE, 0), folder / "0")
        with start_server(tmp_path / "server.log", checkpoint) as server:
            loaded = digest_of(server)
            update(server, draw(DENSE, 1))
            assert storage(digest_of(server)) == storage(loaded)
    codes = {name: held for name, held in loaded.items() if f"{name}_scale_inv" in loaded}
    assert len(codes) == 4 * DENSE.layers  # qkv, o, gate_up, down
    for name, held in codes.items():
        scales = loaded[f"{name}_scale_inv"]
        assert held["dtype"] == "torch.float8_e4m3fn"
        assert scales["dtype"] == "torch.float32"
        assert scales["shape"] == [size // 128 for size in held["shape"]]


def test_a_backend_that_repacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marlin, which SGLang takes for GPUs without FP8 and can be told to take on this one."""
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "1")
    log = tmp_path / "engine.log"
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, draw(DENSE, 0), folder / "0")
        with pytest.raises(RuntimeError, match="has ended"):
            start_engine(log, checkpoint)
    assert f"qkv_proj {SENTENCE}" in log.read_text(errors="replace")


def test_storage_elsewhere_is_seen_and_changes_in_place_are_kept() -> None:
    """What shows without addresses is tested on CPUs (``test_linear.py``)."""
    layer: Any = nn.Module()
    for name, dtype in (("weight", torch.float8_e4m3fn), ("weight_scale_inv", torch.float32)):
        value = torch.ones(2, 2, device="cuda").to(dtype)
        setattr(layer, name, nn.Parameter(value, requires_grad=False))

    def in_place(layer: Any) -> None:
        layer.weight.data = layer.weight.data  # as SGLang's own block-FP8 method does
        layer.weight_scale_inv.data.mul_(2)

    def elsewhere(layer: Any) -> None:
        layer.weight.data = layer.weight.data.clone()

    keep_storage(in_place, layer, "mlp.down_proj")
    assert layer.weight_scale_inv.eq(2).all()
    with pytest.raises(RuntimeError, match=f"mlp.down_proj {SENTENCE}"):
        keep_storage(elsewhere, layer, "mlp.down_proj")
