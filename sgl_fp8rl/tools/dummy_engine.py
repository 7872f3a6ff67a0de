"""An engine with dummy weights: only SGLang knows a model's layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_fp8rl.tools.ports import Port


@contextmanager
def dummy_engine(model: str, tp_size: int, **options: Any) -> Iterator[Any]:
    """An ``sgl.Engine`` that answers control messages and generates nothing.

    Raises:
        ImportError: SGLang is not installed.
        OSError: the path has no model, or no port is free.
        ValueError: an option is refused.
    """
    import sglang

    with Port() as port:
        engine = sglang.Engine(
            model_path=model,
            quantization="fp8rl",
            load_format="dummy",
            tp_size=tp_size,
            nccl_port=port.number,
            skip_tokenizer_init=True,
            max_total_tokens=1024,  # nothing is generated: no large KV cache, no captured graphs
            disable_cuda_graph=True,
            log_level="error",
            **options,
        )
        try:
            yield engine
        finally:
            engine.shutdown()
