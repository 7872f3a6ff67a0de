"""Whether a model computes its logits with its embedding, as the checkpoints of tied models ask."""

from sgl_fp8rl import compat
from sgl_fp8rl.protocol.manifest import TIED_HEAD
from sgl_fp8rl.weight_update.engine_weights import EngineWeights


def tied_shape(weights: EngineWeights) -> list[int] | None:
    """The shape of the embedding in a checkpoint, ``[V, H]``; None where an update brings a head of
    its own."""
    model, table = weights.model, weights.table
    if table is not None and table.routes.get(TIED_HEAD):
        return None
    embedding = next((m for m in model.modules() if isinstance(m, compat.Embedding)), None)
    if embedding is None:
        return None
    head = dict(model.named_parameters(remove_duplicate=False)).get(TIED_HEAD)
    if head is None:
        config = getattr(weights.model, "config", None)
        configs = config, getattr(config, "text_config", None)
        tied = any(getattr(each, "tie_word_embeddings", False) for each in configs)
    else:
        tied = head.data_ptr() == embedding.weight.data_ptr()
    return [embedding.org_vocab_size, embedding.embedding_dim] if tied else None
