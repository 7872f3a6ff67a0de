"""Where metrics go: JSONL, Prometheus, pictures; and what they are called elsewhere."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_bridge.correction import CorrectionConfig, correct_logprobs
from trainer_bridge.correction.config import REJECTIONS
from trainer_bridge.metrics import NAMES, PrometheusMetrics, append_jsonl, draw
from trainer_bridge.metrics.alarms import ADVICE
from trainer_bridge.metrics.framework_names import SOURCES
from trainer_bridge.metrics.plot import read_runs
from trainer_bridge.metrics.reducer import Reducer, Values

DOCS = Path(__file__).parents[2] / "docs" / "correction.md"
EVERYTHING = CorrectionConfig(
    rollout_is_batch_normalize=True, rollout_rs=dict.fromkeys(REJECTIONS, 1.5), veto_threshold=0.5
)


def some_metrics(versions: bool = True) -> dict[str, float]:
    trainer_BT, mask_BT = torch.linspace(-1, 0, 40).view(2, 20), torch.ones(2, 20).bool()
    versions_BT = torch.tensor([[4], [7]]).expand(2, 20) if versions else None
    given = trainer_BT, trainer_BT.flip(1), mask_BT, EVERYTHING
    return correct_logprobs(*given, versions_BT=versions_BT).metrics


def test_every_name_in_the_table_is_computed_and_shown_in_the_docs() -> None:
    shown = {name.replace("<option>", "seq_mean_k3") for name in NAMES}
    assert shown <= some_metrics().keys()
    rows = [re.split(r" *\| *", line)[1:-1] for line in DOCS.read_text().splitlines()]
    table = itertools.takewhile(bool, rows[rows.index(["here", *SOURCES]) :])
    documented = {row[0]: row[1:] for row in table}
    for ours, theirs in NAMES.items():
        assert documented[f"`{ours}`"] == [f"`{theirs[s]}`" if s in theirs else "" for s in SOURCES]


def test_each_step_is_a_line_that_any_json_reader_takes(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = some_metrics()
    append_jsonl(path, 1, metrics, arm="fp8")
    append_jsonl(path, 2, {"ess": math.inf, "chi2_seq": math.nan})
    append_jsonl(path, 3, {"version_4/ess": 0.25, "ess": 0.5})
    append_jsonl(path, 4, {"ess": 1.0}, reward=torch.tensor(0.5), grad_norm=math.inf)
    first, second, third, fourth = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"step": 1, "arm": "fp8", **metrics, "alarms": []}
    assert second == {"step": 2, "ess": None, "chi2_seq": None, "alarms": []}
    assert third["alarms"] == ["ess", "version_4/ess"]
    assert fourth == {"step": 4, "reward": 0.5, "grad_norm": None, "ess": 1.0, "alarms": []}


def test_prometheus_reads_back_what_was_shown() -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    registry, gauges = client.CollectorRegistry(), PrometheusMetrics({"run": 'a "quoted" run'})
    registry.register(gauges)
    metrics = some_metrics()
    gauges.update(3, metrics)

    def scraped() -> dict[tuple[str, ...], float]:
        found = {}
        for family in text_string_to_metric_families(client.generate_latest(registry).decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("run") == 'a "quoted" run'
                found[(sample.name, *labels.keys(), *labels.values())] = sample.value
        return found

    values = scraped()
    shown = {metric: values.pop(("fp8rl_alarm", "metric", metric)) for metric in ADVICE}
    assert set(shown.values()) == {0.0}
    assert len(values) == len(metrics) + 1 and values[("fp8rl_step",)] == 3
    assert values[("fp8rl_ess",)] == metrics["ess"]
    by_version = "fp8rl_by_policy_version_ess", "policy_version", "7"
    assert values[by_version] == metrics["version_7/ess"]
    by_position = "fp8rl_by_position_tokens", "position", "16"
    assert values[by_position] == metrics["position_16/tokens"] == 8
    rejected = "fp8rl_rejection_masked_fraction", "rejection", "seq_max_k2"
    assert values[rejected] == metrics["seq_max_k2/masked_fraction"]
    gauges.update(4, some_metrics(versions=False))
    assert by_version not in scraped() and by_position in scraped()
    gauges.update(5, {"ess": 0.9, "version_3/ess": 0.1, "masked_fraction": 0.9})
    alarms = {key[2]: value for key, value in scraped().items() if key[0] == "fp8rl_alarm"}
    assert alarms == dict.fromkeys(ADVICE, 0.0) | {"ess": 1.0, "masked_fraction": 1.0}


def write_run(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_are_drawn_side_by_side(tmp_path: Path) -> None:
    rows = [{"kind": "environment", "device": "CPU"}]
    rows += [{"step": s, "ess": 1 - s / 10, "mismatch_kl_k3": None} for s in range(5)]
    first = write_run(tmp_path / "first.jsonl", [*rows, {"step": 4, "ess": 0.25}])
    arms = [{"step": s, "arm": arm, "ess": 0.9, "reward": s} for s in (0, 1) for arm in ("a", "b")]
    (tmp_path / "second").mkdir()
    write_run(tmp_path / "second" / "metrics.jsonl", arms)
    runs = [first, tmp_path / "second"]
    series = read_runs(runs)
    assert [*series] == ["first", "second a", "second b"]
    assert series["first"][4] == {"step": 4, "ess": 0.25}  # the later row of a resumed step
    assert "mismatch_kl_k3" not in series["first"][0]

    pytest.importorskip("matplotlib")
    picture = tmp_path / "pictures" / "runs.png"
    assert draw(runs, picture) == ["reward", "ess"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert draw(runs, picture, ["ess"]) == ["ess"]
    with pytest.raises(ValueError, match=r"\bkl\b.*ess, reward"):
        draw(runs, picture, ["kl"])


def test_steps_with_an_alarm_are_crossed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    crossed = []
    plot = axes.Axes.plot

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        crossed.extend([tuple(args[:2])] if "x" in args else [])
        return plot(self, *args, **kwargs)

    monkeypatch.setattr(axes.Axes, "plot", noting)
    rows = [{"step": s, "ess": 0.9, "ratio_p99": 1.1} for s in range(4)]
    rows[1]["ess"], rows[3]["version_2/ess"] = 0.1, 0.2
    draw([write_run(tmp_path / "run.jsonl", rows)], tmp_path / "run.png")
    assert crossed == [((1, 3), (0.1, 0.9))]


@pytest.mark.parametrize(("largest", "scales"), [(0.3, ["log"]), (0.0, [])])
def test_a_mismatch_is_drawn_over_decades(
    largest: float, scales: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = pytest.importorskip("matplotlib.axes")
    chosen: list[str] = []
    monkeypatch.setattr(axes.Axes, "set_yscale", lambda _, scale: chosen.append(scale))
    rows = [{"step": 0, "ess": 1.0, "mismatch_kl_k3": 0.0}, {"step": 1, "mismatch_kl_k3": largest}]
    draw([write_run(tmp_path / "run.jsonl", rows)], tmp_path / "run.png")
    assert chosen == scales


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ('{"kind": "note"}\n', "run.jsonl.*step"),
        ("step 1\n", "run.jsonl:1 .*JSON"),
        ("[1]\n", "run.jsonl:1 .*JSON object"),
    ):
        path = tmp_path / "run.jsonl"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_runs([path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty.*step"):
        read_runs([tmp_path / "empty"])


class WaitsForTheDevice(TorchDispatchMode):
    """Notes operations whose result the host must read before it goes on."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if any(wait in name for wait in self.waits):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_before_all_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for the GPU a batch: what the last copy to the host is."""
    with WaitsForTheDevice() as mode:
        before_reduce: list[list[str]] = []
        reduce = Reducer.reduce

        def noted(reducer: Reducer, group: Any) -> Values:
            before_reduce.append(list(mode.seen))
            return reduce(reducer, group)

        monkeypatch.setattr(Reducer, "reduce", noted)
        some_metrics(versions=False)
        assert before_reduce == [[]]
        some_metrics(versions=True)
        assert before_reduce[1]  # control: which versions there are is asked before
