"""A complete set of weights that this process itself has, such as a checkpoint on disk."""

from collections.abc import Iterable

import torch

from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.protocol.policy import CHECKPOINT
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.writers.shared_memory import Bucket
from sgl_fp8rl.receiver.writers.weight_writer import rows_of


def write_all(
    weights: EngineWeights, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write and commit an accepted manifest, as an update from another process would be.

    Args:
        tensors: all of the manifest, in its order; each is read once and let go when it is written.

    Raises:
        SessionError, ValueError: the weights are not sound.
    """
    # not pinned: torch would keep pinned memory for the life of the process
    content = torch.empty(manifest.bucket_bytes, dtype=torch.uint8)
    weights.memory.bucket = bucket = Bucket("local", content)
    session = weights.begin(manifest.fingerprint, CHECKPOINT)
    stream = iter(tensors)
    read: dict[str, torch.Tensor] = {}  # codes and scales travel together, so two are at hand
    for index, chunk in enumerate(session.writer.chunks):
        slot = bucket.slot(index, manifest)
        for chunk_slice in chunk:
            while chunk_slice.name not in read:
                name, tensor = next(stream)
                read[name] = tensor
            tensor, spec = read[chunk_slice.name], manifest.tensors[chunk_slice.name]
            slot.tensor(chunk_slice, spec).copy_(rows_of(tensor, chunk_slice))
            if not spec.shape or chunk_slice.rows[1] == spec.shape[0]:
                del read[chunk_slice.name]
        session.write(index)
    session.finish()
    weights.commit()
    weights.memory.close()
