"""The report of ``sgl-fp8rl precision``, as a table and as JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from server_args.args import FORMATS, RAGGED, flag_name
from sgl_fp8rl.formats.padding import BF16_BYTES
from sgl_fp8rl.tables import align
from sgl_fp8rl.tools.precision.divergence import Divergence
from sgl_fp8rl.tools.precision.groups import Group
from sgl_fp8rl.tools.precision.search import Damage, Point

FLAG = flag_name("ignored_layers")
DEFAULTS = {"format": FORMATS[0], "ragged": RAGGED[0]}
BUDGET_SHARE = 0.5


@dataclass(frozen=True)
class Mitigation:
    """One way to serve the model."""

    name: str
    bf16: Sequence[Group]
    """Layers that are left in BF16."""
    divergence: Divergence


def step_bytes(model: Any, groups: Sequence[Group]) -> int:
    """Weight bytes that a decode step reads with these layers in FP8: all but the embeddings, of
    which it reads rows."""
    weights = {id(p): BF16_BYTES * p.numel() for p in model.parameters()}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        del weights[id(embedding)]
    return int(sum(weights.values())) - _saved(groups)


def _saved(groups: Sequence[Group]) -> int:
    return sum(group.bf16_bytes - group.fp8_bytes for group in groups)


def as_json(
    facts: dict[str, Any],
    ranked: Sequence[Damage],
    points: Sequence[Point],
    budget_kl: float,
    mitigations: Sequence[Mitigation],
    step: int,
) -> dict[str, Any]:
    """The report in plain types. ``layers`` are in order of damage for their bytes.

    Args:
        step: of ``step_bytes``, with every layer in FP8.
    """
    whole = sum(damage.group.bf16_bytes for damage in ranked)
    answer = points[-1]
    names = [damage.group.name for damage in ranked]
    ignored = names[: answer.ignored]
    flags = [f"{flag_name(o)} {facts[o]}" for o, usual in DEFAULTS.items() if facts[o] != usual]
    flags += [f"{FLAG} {shlex.quote(' '.join(ignored))}"] if ignored else []
    return facts | {
        "layers": [
            {
                "name": damage.group.name,
                **asdict(damage.divergence),
                "bf16_bytes": damage.group.bf16_bytes,
                "ignored": number < answer.ignored,
            }
            for number, damage in enumerate(ranked)
        ],
        "kl_sum_of_layers": points[0].predicted_kl,
        "kl_all_fp8": points[0].divergence.kl,
        "budget_kl": budget_kl,
        "kl": answer.divergence.kl,
        "k3": answer.divergence.k3,
        "ignored_layers": ignored,
        "flag": " ".join(flags),
        "measured": [
            {
                "ignored": tried.ignored,
                "kl": tried.divergence.kl,
                "sum_of_layers": tried.predicted_kl,
            }
            for tried in sorted(points, key=lambda tried: tried.ignored)
        ],
        "mitigations": [
            {
                "mitigation": mitigation.name,
                **asdict(mitigation.divergence),
                "bf16_layers": len(mitigation.bf16),
                "bf16_gb": bf16_bytes / 1e9,
                "bf16_share": bf16_bytes / whole,
                "step_bytes": 1 + _saved(mitigation.bf16) / step,
            }
            for mitigation in mitigations
            for bf16_bytes in [sum(group.bf16_bytes for group in mitigation.bf16)]
        ],
    }


def render(found: dict[str, Any]) -> str:
    """The JSON as plain text."""
    total = found["kl_sum_of_layers"]
    layers = [("layer, most KL for its bytes first", "KL", "+-", "k3", "share", "BF16", "")]
    layers += [
        (
            layer["name"],
            f"{layer['kl']:.2e}",
            _relative(layer),
            f"{layer['k3']:.2e}",
            f"{layer['kl'] / total:.1%}" if total else "",
            f"{layer['bf16_bytes'] / 1e6:.1f} MB",
            "ignored" if layer["ignored"] else "",
        )
        for layer in found["layers"]
    ]
    mitigations = [("engine", "KL", "+-", "k3", "BF16 layers", "of the weights", "bytes a step")]
    mitigations += [
        (
            mitigation["mitigation"],
            f"{mitigation['kl']:.2e}",
            _relative(mitigation),
            f"{mitigation['k3']:.2e}",
            str(mitigation["bf16_layers"]),
            f"{mitigation['bf16_gb']:.3g} GB, {mitigation['bf16_share']:.0%}",
            f"{mitigation['step_bytes']:.2f}x",
        )
        for mitigation in found["mitigations"]
    ]
    whole = found["kl_all_fp8"]
    parts = [
        f"{found['model']}: {found['tokens']} tokens of {found['sequences']} sequences, "
        f"{found['source']}, {found['arithmetic']} arithmetic on {found['device']}, FP8 is "
        f"{found['format']}; nats per token",
        align(layers),
        f"all in FP8: KL {whole:.2e}; the layers alone add up to {total:.2e}"
        + (f", {total / whole:.2f} of it" if whole else "")
        + f"; rounding of {found['arithmetic']} arithmetic alone: {found['kl_noise']:.0e}",
        align(mitigations),
        f"KL {found['kl']:.2e} is within the budget of {found['budget_kl']:.2e} with "
        f"{len(found['ignored_layers'])} of {len(found['layers'])} layers in BF16",
    ]
    return "\n\n".join([*parts, *filter(None, [found["flag"]])])


def _relative(found: dict[str, Any]) -> str:
    return f"{found['kl_error'] / found['kl']:.0%}" if found["kl"] else ""
