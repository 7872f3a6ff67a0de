"""What becomes of the KV cache benchmark's cases: rows, the result file, the page's tables."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kv, kv_cases, kv_weights, processes, readme, result_rows
from tests.benchmarks.facts import FACTS


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv.arguments([]).cases == list(kv_cases.DEFAULT)
    some = kv.arguments(["--cases", "update", "engine-fp8rl"])
    assert kv.command(some) == kv.command(kv.arguments([])) == "python examples/benchmarks/kv.py"
    tried = kv.arguments(["--layers", "2", "--output", "x"])
    assert kv.command(tried).endswith("kv.py --layers 2")
    for words in (["--layers", "2"], ["--cases", "logprobs-unit"], ["--cases", "no-such"]):
        with pytest.raises(SystemExit):
            kv.arguments(words)
    assert "name it as well" in capsys.readouterr().err


def fake_case(case: kv_cases.Case, to_score: Any) -> processes.Outcome:
    """What a process of this case may report."""
    slow = 2.0 if case.arm == "stock-bf16" else 1.0

    def report(name: str, arm: str = case.arm, **values: list[float]) -> result_rows.Report:
        return {"arm": arm, "case": name, "model": kv_cases.MODEL, "layers": 36, "values": values}

    found: dict[str, Any] = {}
    if case.name == "engine-stock-block-fp8-kv8-xqa":
        return processes.Outcome(None, "exit status 1: MemoryError: a | b", "")
    if case.part == "logprobs":
        mine: dict[str, Any] = {"prefill": [[-1.0]], "sampled": [[5]], "decode": [[-1.25]]}
        arms = {*to_score.get("no outliers", {}), case.arm}
        mine["scored"] = {arm: [[-1.0]] for arm in arms}
        found["logprobs"] = dict.fromkeys(kv_weights.PLANTED, mine)
    elif case.part == "engine":
        times = {"prefill_s": [8.0] * 4, "decode_step_ms": [9.0 * slow] * 3}
        found["reports"] = [
            report("capacity", kv_tokens=[990.0], kv_tokens_floor=[1000.0], copy_tb_s=[4.2]),
            *(report(name, **times) for name in ("128x512", "64x8192")),
        ]
    elif case.part == "update":
        found["reports"] = [
            report(f"update, {name} KV scales", update_wall_ms=[14.0, 15.0])
            for name in ("with", "without")
        ]
    else:
        error = {"kv_error": [0.02, 0.03], "kv_error_max": [0.1]}
        timed = {"attention_us": [300.0], "attention_floor_us": [150.0]}
        arm = f"{case.name}, layer scales"
        found["reports"] = [
            report("64x8192", arm, **error, **timed),
            report("64x32768", arm, **error, **timed),
            report("64x8192, K beyond 448", arm, **error),
        ]
    return processes.Outcome(found, None, "")


def test_a_run_becomes_rows_and_the_readme_s_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv, "environment", lambda command: FACTS | {"command": command})
    monkeypatch.setattr(kv, "run_case", lambda case, options, to_score: fake_case(case, to_score))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    blocks = [f"<!-- measured: {name} -->\n<!-- end -->\n" for name in ("kv", "kv_accuracy")]
    text = f"a\n{blocks[0]}b\n{blocks[1]}c\n"
    assert readme.BLOCK.sub(readme.filled, text) == text  # nothing was measured yet
    path = tmp_path / "kv.json"
    kv.main(["--output", str(path)])
    content = json.loads(path.read_text())
    made = content["rows"]
    schema = {"arm", "model", "case", "metric", "unit", "median", "min", "max", "n", "ratios"}
    assert all(schema | {"process"} <= row.keys() for row in made)
    assert len({(r["arm"], r["case"], r["metric"]) for r in made}) == len(made)
    assert {row["process"] for row in made} == set(kv_cases.DEFAULT)
    once = readme.BLOCK.sub(readme.filled, text)
    assert readme.BLOCK.sub(readme.filled, once) == once
    lines = once.splitlines()
    assert "| stock-bf16 | 990 | 99.0% | 8.0 s | 18.00 ms | 18.00 ms | |" in lines
    assert "| fp8rl-kv8 | 990 | 99.0% | 8.0 s | 9.00 ms | 9.00 ms | 2.00x |" in lines
    assert "| attention, layer scales | 0.0250 | 0.0250 | 0.0250 | 300 us | 300 us | 50% |" in lines
    assert "| fp8rl, BF16 KV |  | 0.2500 |  | 0.2500 |" in lines
    assert "| fp8rl-kv8, per head scales | 0.0000 | 0.2500 | 0.0000 | 0.2500 |" in lines
    assert "| with KV scales | 14.50 ms (14.00 to 15.00) |" in lines
    assert "fails: exit status 1: MemoryError: a | b" in once
    for head in (line for line in lines if line.startswith(("| engine", "| attention,", "| logp"))):
        assert {line.count("|") for line in lines if line.startswith("|")} >= {head.count("|")}
    assert "MemoryError" in capsys.readouterr().out

    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    engines = [name for name in kv_cases.DEFAULT if name.startswith("engine")]
    others = [name for name in kv_cases.DEFAULT if name not in engines]
    for part, cases in zip(parts, (others, engines), strict=True):
        kv.main(["--output", str(part), "--cases", *cases])
    kv.main(["--output", str(tmp_path / "both.json"), "--merge", *map(str, parts)])
    both = json.loads((tmp_path / "both.json").read_text())
    assert sorted(both["rows"], key=json.dumps) == sorted(made, key=json.dumps)
    with pytest.raises(ValueError, match="measure each arm once"):
        kv.main(["--output", "x", "--merge", str(parts[0]), str(path)])

    kv.main(["--output", str(path), "--cases", "update"])
    again = json.loads(path.read_text())["rows"]
    assert {(r["process"], r["metric"]) for r in again} == {
        (r["process"], r["metric"]) for r in made
    }
    monkeypatch.setitem(FACTS, "commit", "def5678")
    kv.main(["--output", str(path), "--cases", "update"])
    assert {r["process"] for r in json.loads(path.read_text())["rows"]} == {"update"}


def test_a_case_that_dies_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv_arm.py").write_text(
        "import json, sys\nfrom pathlib import Path\n"
        "job = json.loads(Path(sys.argv[1]).read_text())\n"
        "if job['name'] == 'update': raise MemoryError('too much')\n"
        "Path(job['report']).write_text(json.dumps(job))\n"
    )
    monkeypatch.setattr(kv, "HERE", tmp_path)
    options = kv.arguments(["--layers", "3", "--output", "x"])
    outcome = kv.run_case(kv_cases.find("update"), options, {})
    assert outcome.failure == "exit status 1: MemoryError: too much"
    outcome = kv.run_case(kv_cases.REFERENCE, options, {"a": {"b": [[1]]}})
    assert outcome.report is not None and outcome.report["to_score"] == {"a": {"b": [[1]]}}
    assert outcome.report["layers"] == 3 and outcome.report["name"] == "logprobs-bf16"
