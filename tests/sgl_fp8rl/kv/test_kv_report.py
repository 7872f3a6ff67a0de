"""The report of an FP8 KV cache: its figures by hand, its table and its file."""

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_fp8rl.receiver.kv.scales import read_file
from sgl_fp8rl.tools import kv_report


def a_reply() -> dict[str, Any]:
    """Two layers of two KV heads; layer 1 has a scale a head, is clipped, and saw NaN."""
    none = {"tokens": 64, "not_finite_k": 0, "not_finite_v": 0}
    return {
        "scheme": "engine",
        "pending": False,
        "scales": [[[0.25, 0.25], [0.125, 0.125]], [[0.5, 0.125], [1.0, 1.0]]],
        "statistics": [
            counts(tokens=100, amax_k=56.0, amax_v=28.0),
            counts(tokens=100, amax_k=448.0, amax_v=14.0, clipped_k=512),
        ],
        "elements": [256, 256],
        "errors": [
            none | {"error_k": 0.025, "error_v": 0.0264},
            none | {"error_k": 0.125, "error_v": 0.026, "not_finite_v": 3},
        ],
    }


def counts(**values: float) -> dict[str, float]:
    return {"clipped_k": 0, "clipped_v": 0} | values


def test_figures_that_were_worked_out_by_hand() -> None:
    k0, v0, k1, v1 = lines = kv_report.lines_of(a_reply())
    assert [(line.layer, line.side) for line in lines] == [
        (n, side) for n in (0, 1) for side in "kv"
    ]
    assert (k0.amax, k0.headroom, k0.clip_rate) == (56.0, 2.0, 0.0)
    assert (v0.amax, v0.headroom, v0.error) == (28.0, 2.0, 0.0264)
    assert (k1.least_scale, k1.largest_scale, k1.headroom) == (0.125, 0.5, 0.5)
    assert k1.clip_rate == 512 / (100 * 256)
    assert (v1.clip_rate, v1.not_finite, v1.error_tokens) == (0.0, 3, 64)


def test_an_answer_that_tells_less_is_a_report_with_gaps() -> None:
    reply = a_reply()
    del reply["elements"], reply["errors"]
    lines = kv_report.lines_of(reply)
    assert all(line.clip_rate is None is line.error for line in lines)
    assert kv_report.render(reply, lines).splitlines()[3].split()[-3:] == ["2", "-", "-"]


def test_an_int8_cache_has_no_scales_of_layers() -> None:
    reply = a_reply() | {"scales": None, "scheme": None, "format": "int8"}
    lines = kv_report.lines_of(reply)
    assert {(line.largest_scale, line.headroom) for line in lines} == {(None, None)}
    assert [line.amax for line in lines] == [line.amax for line in kv_report.lines_of(a_reply())]
    assert "INT8" in kv_report.render(reply, lines)


def test_the_saved_report_is_a_report_again_and_a_file_of_scales(tmp_path: Path) -> None:
    reply, path = a_reply(), tmp_path / "kv.json"
    lines = kv_report.lines_of(reply)
    path.write_text(kv_report.as_json(reply, lines))
    again = kv_report.read(str(path))
    assert kv_report.lines_of(again) == lines
    assert again["report"][2]["clip_rate"] == 0.02
    assert read_file(path) == reply["scales"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"kv\.json"),
        ("{", r"kv\.json.*http://"),
        ("[1]", r"kv-report --json"),
        ("{}", "KeyError: 'scales'"),
        ('{"scales": [], "statistics": []}', "no layers"),
        ({"scales": 3}, "TypeError"),
        ({"scales": [[[1.0]]]}, "kv-report --json"),
        ({"statistics": [{}, {}]}, "KeyError: 'tokens'"),
        ({"statistics": [1, 2]}, "TypeError"),
        ({"elements": [256]}, "ValueError"),
        ({"errors": [{}, {}]}, "KeyError: 'error_k'"),
        ({"scales": [[["a"]] * 3] * 2}, "ValueError"),
    ],
    ids=str,
)
def test_what_is_no_answer_is_a_sentence(content: Any, sentence: str, tmp_path: Path) -> None:
    """Of a file that holds it, of a report that is spoiled, and of no file."""
    path = tmp_path / "kv.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(a_reply() | content))
    with pytest.raises(kv_report.ReportError, match=sentence):
        kv_report.lines_of(kv_report.read(str(path)))
