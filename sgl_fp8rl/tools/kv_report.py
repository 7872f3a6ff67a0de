"""``sgl-fp8rl kv-report``: what an engine reports of its FP8 KV cache, as a table.

It reads the reply to the control message ``kv``, from an engine or from a file.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_fp8rl.ops.reference import FP8_MAX
from sgl_fp8rl.tables import align
from trainer_bridge.engines.engine_client import connect

Reply = dict[str, Any]

SIDES = ("k", "v")
HEADER = ("layer", "", "tokens", "amax", "scale", "headroom", "clipped", "error")
UNKNOWN = "-"
NOT_MEASURED = {"tokens": 0, "error_k": None, "error_v": None, "not_finite_k": 0, "not_finite_v": 0}


class ReportError(ValueError):
    """The source is not an engine's reply."""


@dataclass(frozen=True)
class Line:
    """Statistics of K or V of one layer since its scales were set."""

    layer: int
    side: str
    """``k`` or ``v``."""
    tokens: int
    amax: float
    """The largest finite magnitude."""
    least_scale: float | None
    largest_scale: float | None
    """Over KV heads; None where each token has a scale of its own."""
    headroom: float | None
    """``448 * largest_scale / amax``; below 1 values are clipped. None if only zeros were stored,
    or each token has a scale of its own."""
    clip_rate: float | None
    """Share of stored elements that were clipped; None if unknown."""
    error: float | None
    """``|x - stored| / |x|``, L2, over the prefilled tokens that were measured; None if none."""
    error_tokens: int
    not_finite: int
    """Number of NaN and Inf elements, which the error excludes."""


def read(source: str) -> Reply:
    """The reply of the engine at an ``http://`` address, or a reply that was saved to a file.

    Raises:
        EngineError: the engine refuses, or cannot be reached.
        ReportError: the file cannot be read.
    """
    if _is_address(source):
        return connect(source).control({"op": "kv"})
    try:
        reply = json.loads(Path(source).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{source} cannot be read ({error}); pass an engine's http:// address, or a file that "
            f"kv-report --json wrote"
        ) from error
    return reply if isinstance(reply, dict) else {}


def observe(source: str) -> int:
    """Have an engine measure the error of its next prefills; return of how many tokens.

    Raises:
        EngineError: the engine refuses, or cannot be reached.
        ReportError: the source is not an address.
    """
    if not _is_address(source):
        raise ReportError(f"{source} is not an engine; pass an http:// address with --observe")
    return int(connect(source).control({"op": "kv_observe"})["tokens"])


def _is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def lines_of(reply: Reply) -> list[Line]:
    """Two lines per layer, K and V.

    Raises:
        ReportError: this is not a reply to ``kv``.
    """
    try:
        scales, counted = reply["scales"], reply["statistics"]
        scales = [None] * len(counted) if scales is None else scales
        # None or missing unless requested from the engine
        elements = reply.get("elements") or [0] * len(counted)
        errors = reply.get("errors") or [NOT_MEASURED] * len(counted)
        lines = [
            _line(layer, row, *reported)
            for layer, reported in enumerate(zip(scales, counted, elements, errors, strict=True))
            for row in range(len(SIDES))
        ]
        if not lines:
            raise ValueError("it has no layers")
        return lines
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ReportError(
            f"this is not a reply to the control message kv ({type(error).__name__}: {error}); "
            f"save one with kv-report --json"
        ) from error


def _line(
    layer: int,
    row: int,
    scales: list[list[float]] | None,
    counted: dict[str, Any],
    elements_of_token: int,
    errors: dict[str, Any],
) -> Line:
    side = SIDES[row]
    tokens, amax = int(counted["tokens"]), float(counted[f"amax_{side}"])
    of_heads = None if scales is None else [float(scale) for scale in scales[row]]
    least, largest = (None, None) if of_heads is None else (min(of_heads), max(of_heads))
    elements = tokens * int(elements_of_token)
    return Line(
        layer=layer,
        side=side,
        tokens=tokens,
        amax=amax,
        least_scale=least,
        largest_scale=largest,
        headroom=FP8_MAX * largest / amax if amax and largest is not None else None,
        clip_rate=counted[f"clipped_{side}"] / elements if elements else None,
        error=errors[f"error_{side}"],
        error_tokens=int(errors["tokens"]),
        not_finite=int(errors[f"not_finite_{side}"]),
    )


def as_json(reply: Reply, lines: list[Line]) -> str:
    """The engine's reply plus the report: still a file for the option ``kv_scales``."""
    return json.dumps({**reply, "report": [asdict(line) for line in lines]}, indent=1) + "\n"


def render(reply: Reply, lines: list[Line]) -> str:
    """A plain text table, two lines a layer, and what stands out."""
    rows = [
        (
            str(line.layer) if line.side == SIDES[0] else "",
            line.side.upper(),
            str(line.tokens),
            f"{line.amax:.4g}",
            _scale(line),
            _number(line.headroom, ".3g"),
            _rate(line.clip_rate),
            _number(line.error, ".4f"),
        )
        for line in lines
    ]
    table = align([HEADER, *rows], left=(0, 1))
    return "\n".join([title(reply), "", table, "", *_remarks(reply, lines)])


def title(reply: Reply) -> str:
    """Such as ``FP8 KV cache: 36 layers, 8 KV heads, scheme engine``."""
    if reply["scales"] is None:
        return f"INT8 KV cache: {len(reply['statistics'])} layers, a scale for each token and head"
    layers, heads = len(reply["scales"]), len(reply["scales"][0][0])
    return f"FP8 KV cache: {layers} layers, {heads} KV heads, scheme {reply.get('scheme')}"


def _remarks(reply: Reply, lines: list[Line]) -> list[str]:
    """The extreme line of each column, then the limits of the figures."""
    remarks = []
    tight = min(lines, key=lambda line: math.inf if line.headroom is None else line.headroom)
    if tight.headroom is not None:
        remarks.append(f"least headroom: {tight.headroom:.3g} ({_place(tight)})")
    clipped = max(lines, key=lambda line: line.clip_rate or 0.0)
    if clipped.clip_rate:
        remarks.append(f"most clipped: {_rate(clipped.clip_rate)} ({_place(clipped)})")
    wrong = max(lines, key=lambda line: line.error or 0.0)
    if wrong.error:
        remarks.append(f"largest error: {wrong.error:.4f} ({_place(wrong)})")
    remarks += [
        f"{_place(line)}: {line.not_finite} elements are NaN or Inf"
        for line in lines
        if line.not_finite
    ]
    if reply.get("pending"):
        remarks.append("pending: the next prefill measures these scales again")
    measured = {line.error_tokens for line in lines}
    if 0 in measured:
        remarks.append(
            "error: not measured in every layer; run kv-report --observe, let the engine prefill, "
            "and ask again"
        )
    else:
        remarks.append(f"error: over {min(measured)} prefilled tokens")
    return remarks


def _place(line: Line) -> str:
    return f"{line.side.upper()} of layer {line.layer}"


def _scale(line: Line) -> str:
    if line.largest_scale is None:
        return UNKNOWN
    least, largest = f"{line.least_scale:.4g}", f"{line.largest_scale:.4g}"
    return largest if least == largest else f"{least} to {largest}"


def _rate(rate: float | None) -> str:
    return UNKNOWN if rate is None else f"{rate:.2%}" if rate >= 1e-3 else f"{rate:.2g}"


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
