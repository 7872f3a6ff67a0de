"""Whether a model computes its logits with its embedding, as the checkpoints of tied models ask."""

from sgl_fp8rl.engine import compat
from sgl_fp8rl.protocol.manifest import TIED_HEAD
from sgl_fp8rl.receiver.engine_weights import EngineWeights


def tied_shape(weights: EngineWeights) -> list[int] | None:
    """The shape of the embedding in a checkpoint, ``[V, H]``; None where an update brings a head of
    its own."""
    model, table = weights.model, weights.table
    if table is not None and table.routes.get(TIED_HEAD):
        return None
    embeddings = [m for m in model.modules() if isinstance(m, compat.Embedding)]
    named = dict(model.named_parameters(remove_duplicate=False))
    head = named.get(TIED_HEAD)
    if head is None:
        config = getattr(weights.model, "config", None)
        configs = config, getattr(config, "text_config", None)
        if not any(getattr(each, "tie_word_embeddings", False) for each in configs):
            return None
    else:
        shared = [name for name, p in named.items() if p.data_ptr() == head.data_ptr()]
        if len(shared) < 2:
            return None
        embeddings = [m for m in embeddings if m.weight.data_ptr() == head.data_ptr()]
    if not embeddings:
        return None
    # a vision tower may have one of its own, of positions
    embedding = max(embeddings, key=lambda each: each.org_vocab_size)
    return [embedding.org_vocab_size, embedding.embedding_dim]
