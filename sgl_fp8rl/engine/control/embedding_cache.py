"""SGLang's cache of what vision and audio towers computed, which no flush of its caches clears."""

from sgl_fp8rl.engine import compat


def forget_embeddings() -> None:
    """Drop the embeddings of the policy before: SGLang finds them by the hash of an image alone.

    Each rank has a cache of its own. A request in flight computes its embeddings again, since it
    keeps its images until it ends.
    """
    # a global of the module that has this function, which the newer SGLang moved
    cache = compat.init_mm_embedding_cache.__globals__["embedding_cache"]
    if cache is not None:
        cache.clear()
