"""The report of ``sgl-fp8rl precision``, as a table and as JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from server_args.args import FORMATS, RAGGED, flag_name
from sgl_fp8rl.tables import align
from sgl_fp8rl.tools.precision.search import Damage, Point

FLAG = flag_name("ignored_layers")
DEFAULTS = {"format": FORMATS[0], "ragged": RAGGED[0]}
BUDGET_SHARE = 0.5


def as_json(
    facts: dict[str, Any],
    ranked: Sequence[Damage],
    points: Sequence[Point],
    budget_kl: float,
) -> dict[str, Any]:
    """The report in plain types. ``layers`` are in order of damage for their bytes."""
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
    whole = found["kl_all_fp8"]
    sizes = {layer["name"]: layer["bf16_bytes"] for layer in found["layers"]}
    kept = sum(sizes[name] for name in found["ignored_layers"])
    parts = [
        f"{found['model']}: {found['tokens']} tokens of {found['sequences']} sequences, "
        f"{found['source']}, {found['arithmetic']} arithmetic on {found['device']}, FP8 is "
        f"{found['format']}; nats per token",
        align(layers),
        f"all in FP8: KL {whole:.2e}; the layers alone add up to {total:.2e}"
        + (f", {total / whole:.2f} of it" if whole else ""),
        f"KL {found['kl']:.2e} is within the budget of {found['budget_kl']:.2e} with "
        f"{len(found['ignored_layers'])} of {len(found['layers'])} layers in BF16, "
        f"{kept / sum(sizes.values()):.0%} of their weights",
    ]
    return "\n\n".join([*parts, *filter(None, [found["flag"]])])


def _relative(found: dict[str, Any]) -> str:
    return f"{found['kl_error'] / found['kl']:.0%}" if found["kl"] else ""
