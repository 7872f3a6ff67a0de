"""The updater of slime and miles, on one rank and on two, with engines in the same processes."""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

import trainer_bridge
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.states import State
from tests.examples.conftest import one_rank  # noqa: F401  (a fixture)
from tests.integrations.slime import frameworks
from tests.integrations.slime.frameworks import from_first_rank, options
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_fsdp import gathered
from tests.trainer_bridge.test_update import SMALL, engine_of, holds
from trainer_bridge.adapters import slime as ours
from trainer_bridge.adapters.contract import check_refusals, check_resume, check_updates

ROOT = Path(__file__).parents[3]
COLLECTIVE_TIMEOUT_S = 60.0
ADDRESSES = ["127.0.0.1:30000", "http://127.0.0.1:30001", "127.0.0.1:30002"]
URLS = [f"http://127.0.0.1:{port}" for port in (30000, 30001, 30002)]
stock_update = trainer_bridge.update


class Engines:
    """Engines by their address, and the keywords of each update."""

    def __init__(self) -> None:
        self.engines = {url: engine_of(1, SMALL) for url in URLS}
        self.led: list[tuple[str, dict[str, Any]]] = []

    def update(self, stream: Any, engine: str, **keywords: Any) -> Any:
        self.led.append((engine, keywords))
        return stock_update(stream, self.engines[engine], **keywords)

    def __getitem__(self, index: int) -> FakeEngine:
        return self.engines[URLS[index]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(trainer_bridge, "update", found.update)
    return found


@pytest.fixture(params=ours.FRAMEWORKS)
def framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    for module, value in frameworks.modules(name).items():
        monkeypatch.setitem(sys.modules, module, value)
    return name


@pytest.mark.usefixtures("one_rank")
def test_versions_begin_at_one_and_a_trainer_that_resumes_begins_again(
    framework: str, engines: Engines
) -> None:
    args = options(framework, ADDRESSES[:1])
    for seed in (0, 2):  # a trainer, and the one that is started from its checkpoint
        weights = toy.checkpoint(seed)
        updater = frameworks.start(framework, args, lambda: weights, from_first_rank)  # noqa: B023
        for version in (1, 2):
            weights = toy.checkpoint(seed + version)
            frameworks.update(framework, updater)
            assert holds(engines[0], weights)
            assert updater.weight_version == engines[0].ranks[0].policy.version == version
    first, again, resumed, last = (keywords["run"] for _, keywords in engines.led)
    assert first == again != resumed == last
    asked = {keywords["in_flight"] for _, keywords in engines.led}
    assert asked == {{"slime": "abort", "miles": "retract"}[framework]}
    assert {keywords["announce"] for _, keywords in engines.led} == {args.hf_checkpoint}


@pytest.mark.usefixtures("one_rank")
def test_a_rank_leads_several_engines_where_ranks_are_few(framework: str, engines: Engines) -> None:
    weights = toy.checkpoint(1)
    args = options(framework, ADDRESSES)
    updater = frameworks.start(framework, args, lambda: weights, from_first_rank)
    frameworks.update(framework, updater, len(ADDRESSES))
    assert [url for url, _ in engines.led] == URLS
    assert all(holds(engine, weights) for engine in engines.engines.values())
    assert len({keywords["run"] for _, keywords in engines.led}) == 1
    metrics = updater.pop_metrics()
    one = 2 * (sum(t.numel() for t in weights.values()) + weights["mlp.router.weight"].numel())
    assert metrics["perf/fp8rl_update_bytes"] == len(ADDRESSES) * one
    assert metrics["perf/fp8rl_update_seconds"] > 0
    assert updater.pop_metrics() == {}


@pytest.mark.usefixtures("one_rank")
def test_engines_that_nobody_named_are_refused(framework: str, engines: Engines) -> None:
    args = options(framework, ADDRESSES[:2])
    updater = frameworks.start(framework, args, toy.checkpoint, from_first_rank)
    with pytest.raises(ValueError, match="names 2 engines, and the rollout has 3"):
        frameworks.update(framework, updater, 3)
    assert engines.led == []


def test_miles_connects_again_where_it_says_so() -> None:
    updater: Any = object.__new__(ours.Updater)
    updater._args = options("miles", ADDRESSES[:1])
    updater._is_connected = False
    for _ in range(2):
        assert not updater.is_rollout_engines_fresh()
        updater.connect_rollout_engines([object()], object())
        assert updater.is_rollout_engines_fresh()
        updater.mark_engine_connection_stale()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"colocate": True}, "sglang serve --quantization fp8rl"),
        ({"rollout_external_engine_addrs": None}, "sglang serve --quantization fp8rl"),
        ({"update_weight_mode": "delta"}, "--update-weight-mode delta"),
        ({"update_weight_transport": "disk"}, "--update-weight-transport disk"),
        ({"update_weight_transfer_mode": "p2p"}, "--update-weight-transfer-mode p2p"),
        ({"pause_generation_mode": "in_place"}, "KV cache of older weights"),
    ],
)
def test_options_are_refused_before_the_class_is_replaced(
    framework: str, changed: dict[str, Any], why: str
) -> None:
    actor: Any = sys.modules[f"{framework}.{ours.ACTOR}"]
    with pytest.raises(ValueError, match=why):
        ours.init(options(framework, ADDRESSES, **changed))
    assert actor.UpdateWeightFromDistributed is frameworks.Stock
    ours.init(options(framework, ADDRESSES))
    assert actor.UpdateWeightFromDistributed is not frameworks.Stock


def test_sampling_that_changes_logprobs_is_refused(framework: str) -> None:
    def set_up(sampling: Mapping[str, Any]) -> None:
        named = {f"rollout_{name}": value for name, value in sampling.items()}
        ours.init(options(framework, ADDRESSES, **named))

    check_refusals(set_up, ("top_p", "top_k"))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"is_lora": True}, "no LoRA adapters"),
        ({"quantization_config": {"quant_method": "fp8"}}, "pass the BF16 checkpoint"),
    ],
)
def test_a_policy_that_cannot_be_sent_is_refused(
    framework: str, changed: dict[str, Any], why: str
) -> None:
    args = options(framework, ADDRESSES)
    with pytest.raises(ValueError, match=why):
        frameworks.start(framework, args, toy.checkpoint, from_first_rank, **changed)


def test_a_process_without_a_train_actor_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has loaded neither"):
        ours.init(options("slime", ADDRESSES))


def test_an_actor_that_moves_weights_in_another_way_is_refused(framework: str) -> None:
    actor: Any = sys.modules[f"{framework}.{ours.ACTOR}"]
    del actor.UpdateWeightFromDistributed
    with pytest.raises(RuntimeError, match=rf"{framework}.*in another way"):
        ours.init(options(framework, ADDRESSES))


def test_the_example_names_our_function(framework: str) -> None:
    """Read as the frameworks read it: each key becomes an option, this one the path of a call."""
    given = yaml.safe_load((ROOT / "examples" / "slime" / "fp8rl.yaml").read_text())
    module, _, name = given.pop("custom_megatron_init_path").rpartition(".")
    assert given == {}
    getattr(import_module(module), name)(options(framework, ADDRESSES))
    actor: Any = sys.modules[f"{framework}.{ours.ACTOR}"]
    assert actor.UpdateWeightFromDistributed is not frameworks.Stock


def two_ranks(rank: int, folder: Path) -> None:
    """Each rank leads an engine; the second engine's update fails in the middle; both go on, and
    keep the contract."""
    sys.modules.update(frameworks.modules("slime"))
    found = Engines()
    trainer_bridge.update = found.update
    policies = [toy.checkpoint(seed) for seed in range(4)]
    now, faulty, walked = policies[1], False, 0

    def gather(weights: Any) -> frameworks.Pairs:
        nonlocal walked
        for walked, (name, tensor) in enumerate(from_first_rank(weights), 1):
            is_cut = faulty and rank == 1 and walked == len(weights) // 2
            yield name, tensor[:-1] if is_cut else tensor

    args = options("slime", ADDRESSES[:2])
    updater = frameworks.start("slime", args, lambda: now, gather)
    frameworks.update("slime", updater, 2)
    assert [url for url, _ in found.led] == [URLS[rank]]
    assert holds(found[rank], now)
    assert gathered(found.led[0][1]["run"]) == [found.led[0][1]["run"]] * 2
    metrics = updater.pop_metrics()
    assert metrics and gathered(metrics) == [metrics] * 2

    now, faulty, walked = policies[2], True, 0
    with pytest.raises((ManifestError, RuntimeError)) as caught:
        frameworks.update("slime", updater, 2)
    assert walked == len(now)
    assert updater.pop_metrics() == {}
    found[rank].control({"op": "end"})  # waits until the session has ended
    state = found[rank].ranks[0].state
    if rank == 1:
        assert caught.type is ManifestError and state is State.QUARANTINED
    else:
        assert caught.type is RuntimeError and state is State.SERVING
        assert "version 2" in str(caught.value) and URLS[1] in str(caught.value)

    now, faulty = policies[3], False
    frameworks.update("slime", updater, 2)
    assert updater.weight_version == found[rank].ranks[0].policy.version == 3
    assert holds(found[rank], now)

    keeps_the_contract(args, found[0] if rank == 0 else None, policies[0])
    assert holds(found[rank], policies[0])
    (folder / f"passed-{rank}").touch()


def keeps_the_contract(args: Any, first: FakeEngine | None, policy: toy.Tensors) -> None:
    """Over both ranks, each of which leads an engine: rank 0 the ``first``."""

    def start() -> Any:
        pairs: Any = None
        updater = frameworks.start("slime", args, lambda: policy, lambda _: pairs)

        def sync(stream: Any, step: int | None) -> int:
            nonlocal pairs
            pairs = stream
            frameworks.update("slime", updater, 2)
            return updater.weight_version  # type: ignore[no-any-return]

        return sync

    def walk() -> Any:
        return from_first_rank(policy)

    def sample() -> list[int]:
        return [] if first is None else first.sampled()

    check_updates(first, walk, start(), sample, dist.group.WORLD)
    check_resume(first, walk, start, sample, dist.group.WORLD)


@pytest.mark.guarantee("all-or-none", fault="slime: one of two engines fails in the middle")
def test_two_ranks_lead_two_engines_and_share_a_failure(tmp_path: Path) -> None:
    ranks.run(two_ranks, tmp_path, 2, COLLECTIVE_TIMEOUT_S)
    assert len(list(tmp_path.glob("passed-*"))) == 2
