"""SGLang's real cache of embeddings; ``tests/engine/test_in_flight.py`` has it in an engine."""

from typing import Any

import pytest
import torch


@pytest.fixture
def forget() -> Any:
    import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

    from sgl_fp8rl.engine.control.embedding_cache import forget_embeddings

    return forget_embeddings


def test_an_embedding_is_not_found_again(forget: Any) -> None:
    from sglang.srt.managers.mm_utils import init_mm_embedding_cache
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    namespace = init_mm_embedding_cache.__globals__
    assert namespace["embedding_cache"] is None
    forget()  # an engine that has none yet
    try:
        init_mm_embedding_cache(1 << 10)
        cache = namespace["embedding_cache"]
        key = cache.combine_hashes([7])
        cache.set(key, EmbeddingResult(embedding=torch.ones(2, 3)))
        assert cache.get([7]) is not None
        forget()
        assert cache.get([7]) is None
        assert cache.current_size == 0
        assert namespace["embedding_cache"] is cache
    finally:
        namespace["embedding_cache"] = None
