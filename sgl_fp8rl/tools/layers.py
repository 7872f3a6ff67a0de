"""The layers of a model, as an engine would hold them, for ``sgl-fp8rl layers``: only SGLang knows
them, so an engine with dummy weights tells."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sgl_fp8rl.engine import compat
from sgl_fp8rl.tables import align
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


def read_layers(model: str, tp_size: int) -> list[dict[str, Any]]:
    """Ask an engine with dummy weights.

    Returns:
        One ``quant_config.LayerFormat`` as a dictionary for each layer, as the first rank holds it.

    Raises:
        SystemExit: SGLang is not installed, or there is no such model.
    """
    try:
        with dummy_engine(model, tp_size) as engine:
            layers: list[dict[str, Any]] = engine.fp8rl_control({"op": "layers"})["layers"]
    except ImportError as error:
        sys.exit(f"sgl-fp8rl layers needs SGLang ({error}); run {compat.INSTALL}")
    except (OSError, ValueError) as error:  # transformers raises them where the path has no model
        sys.exit(f"sgl-fp8rl layers {model}: {error}")
    return layers


def render_layers(layers: list[dict[str, Any]]) -> str:
    """A plain text table, one line a layer, and a line that counts formats and reasons."""
    header = ("layer", "shape", "format", "reason or padding")
    rows = [
        (
            layer["name"],
            "x".join(str(size) for size in layer["shape"]),
            layer["format"],
            layer["reason"] or _padding(layer),
        )
        for layer in layers
    ]
    table = align([header, *rows], left=range(len(header)))
    return "\n".join([table, "", _summary(layers)])


def _padding(layer: dict[str, Any]) -> str:
    if not layer["unpadded"]:
        return ""
    size = "x".join(map(str, layer["unpadded"]))
    return f"{size} padded, {layer['padding_bytes'] / 1e6:.2f} MB more"


def _summary(layers: list[dict[str, Any]]) -> str:
    from sgl_fp8rl.formats import UNQUANTIZED, counted

    kept = [layer for layer in layers if layer["format"] == UNQUANTIZED.name]
    reasons = Counter(layer["reason"] or "no reason given" for layer in kept)
    others = "; ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    counts = counted(layer["format"] for layer in layers)
    padding = sum(layer["padding_bytes"] for layer in layers) / 1e6
    counts += f", {padding:.2f} MB of them padding" if padding else ""
    return counts + (f"; not quantized: {others}" if others else "")
