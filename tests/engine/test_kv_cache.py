"""An FP8 KV cache whose scales follow the policy, in real engines.

The models have K channels beyond E4M3's range (``models.plant_outliers``). Each engine goes through
one history of scales; what it answered on the way is compared. Errors are mean differences of
prompt logprobs from an engine of the same weights whose KV cache is BF16.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import trainer_bridge
from sgl_fp8rl.receiver.kv.scales import START_V
from tests.engine import models
from tests.engine.harness import FORKED, EngineProcess, Server
from trainer_bridge.engines.engine_client import EngineError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LAYERS, KV_HEADS = 2, 2
CHUNK = 32
PROMPT = torch.randint(
    models.VOCAB, (2 * CHUNK,), generator=torch.Generator().manual_seed(2)
).tolist()
FP8_KV: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "chunked_prefill_size": CHUNK}
ONES = torch.ones(LAYERS, 2, KV_HEADS)
START = torch.tensor([1.0, START_V]).view(2, 1).expand_as(ONES)
"""Scales that nothing was measured for."""
REPAIR = 3.0
"""Calibrated scales make the error smaller by at least this. Healthy: 6.5 with outliers through
QK-norm (1.56 / 0.24); through a bias (1.54) 4.3 by hand (0.36) and 4.5 by a trainer (0.34)."""
INT8_APART = 0.1
"""As ``FLIPS``, in nats. Healthy: 0.07."""
INT8_COST = 0.25
"""What INT8 KV costs without outliers, in nats. Healthy: 0.12."""
FLIPS = 0.5
"""A decoded token's logprob differs from the one that prefill gives it by less than this part of
what FP8 KV costs. Healthy: 0.19 (0.045 / 0.241): one row and many are rounded otherwise, which
flips some codes. It would be about 1 if prefill attended to K and V that are not what it stores."""


def greedy(prompt: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def score(engine: EngineProcess | Server, prompt: list[int] = PROMPT) -> list[float]:
    """Logprobs of the prompt but its first token; SGLang takes no prefix from its cache for it."""
    (reply,) = engine.generate({**greedy(prompt, 1), "logprob_start_len": 0})
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


def rollout(
    engine: EngineProcess | Server, prompt: list[int], tokens: int
) -> tuple[list[int], list[float]]:
    (reply,) = engine.generate(greedy(prompt, tokens))
    return reply["output_ids"], [e[0] for e in reply["meta_info"]["output_token_logprobs"]]


def kv(engine: EngineProcess | Server) -> dict[str, Any]:
    return engine.control({"op": "kv"})


def error(logprobs: list[float], reference: list[float]) -> float:
    return float((torch.tensor(logprobs) - torch.tensor(reference)).abs().mean())


def clipped(report: dict[str, Any]) -> int:
    return sum(layer["clipped_k"] + layer["clipped_v"] for layer in report["statistics"])


class Model:
    """A checkpoint with outliers, and the same with the scales of an update beside it."""

    def __init__(self, family: str, folder: Path) -> None:
        self._folder = folder
        self.plain = models.make_checkpoint(family, folder / "plain")
        self.checkpoint = models.plant_outliers(self.plain, folder / "outliers")

    def with_scales(self, scales: torch.Tensor) -> Path:
        more = {"kv_scales": scales.contiguous()}
        return models.with_tensors(self.checkpoint, self._folder / "scaled", more)

    def with_names(self, k_scale: float, v_scale: float) -> Path:
        """Single scales, in a spelling of its own for each layer."""
        more = {
            f"model.layers.{layer}.self_attn.{between}{row}_scale": torch.tensor(scale)
            for layer, between in enumerate(("", "attn."))
            for row, scale in (("k", k_scale), ("v", v_scale))
        }
        return models.with_tensors(self.checkpoint, self._folder / "named", more)

    def reference(self) -> list[float]:
        """By an engine with a BF16 KV cache."""
        log = self._folder / "reference.log"
        with EngineProcess(log, self.checkpoint, chunked_prefill_size=CHUNK) as engine:
            return score(engine)


def trainer_scales(checkpoint: Path) -> torch.Tensor:
    """What a trainer calibrates in its own forward of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    calibrator = trainer_bridge.KVCalibrator.of(model)
    with calibrator.watch(model), torch.no_grad():
        model(torch.tensor([PROMPT]))
    return calibrator.scales()


def decoded_and_prefilled(engine: EngineProcess | Server) -> tuple[list[float], list[float]]:
    """Logprobs of the same tokens: as they were sampled, and as the prompt's second chunk."""
    tokens, decoded = rollout(engine, PROMPT[:CHUNK], CHUNK)
    return decoded, score(engine, PROMPT[:CHUNK] + tokens)[CHUNK - 1 :]


@pytest.fixture(scope="module")
def qk_norm(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen3", tmp_path_factory.mktemp("qk_norm"))


@pytest.fixture(scope="module")
def reference(qk_norm: Model) -> list[float]:
    return qk_norm.reference()


@pytest.fixture(scope="module")
def history(qk_norm: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine, ``kv_scheme`` engine: what it said, by the name of the step."""
    seen: dict[str, Any] = {}
    log = tmp_path_factory.mktemp("history") / "engine.log"
    with EngineProcess(log, qk_norm.checkpoint, **FP8_KV) as engine:
        version = -1

        def update(checkpoint: Path) -> None:
            nonlocal version
            version += 1
            engine.update(checkpoint, version)

        def refused(scales: torch.Tensor) -> str:
            with pytest.raises(EngineError) as refusal:
                update(qk_norm.with_scales(scales))
            return str(refusal.value)

        def look(name: str) -> None:
            seen[name] = score(engine)
            seen[f"kv {name}"] = kv(engine)

        seen["layout"] = engine.control({"op": "layout"})
        seen["kv start"] = kv(engine)
        look("first")
        seen["decoded"], seen["prefilled"] = decoded_and_prefilled(engine)
        for name, cached in (("missed", 0), ("hit", CHUNK)):
            engine.flush()
            if cached:
                rollout(engine, PROMPT[:cached], 1)
            (reply,) = engine.generate(greedy(PROMPT, CHUNK))
            assert reply["meta_info"]["cached_tokens"] == cached
            seen[name] = reply["meta_info"]["output_token_logprobs"]

        calibrated = torch.tensor(seen["kv first"]["scales"])
        update(qk_norm.with_scales(START))
        look("unit")
        update(qk_norm.with_scales(calibrated))
        look("brought")
        update(qk_norm.with_scales(START))
        look("unit again")
        seen["wrong shape"] = refused(torch.ones(LAYERS, 2, KV_HEADS + 1))
        look("after wrong shape")
        seen["nan"] = refused(torch.full_like(ONES, torch.nan))
        seen["kv nan"] = kv(engine)
        seen["layout nan"] = engine.control({"op": "layout"})
        with pytest.raises(EngineError, match="quarantined"):
            score(engine)
        seen["negative"] = refused(-ONES)
        update(qk_norm.checkpoint)
        seen["kv healed"] = kv(engine)
        look("healed")
        seen["recalibrate"] = engine.control({"op": "kv_recalibrate"})
        seen["kv recalibrate"] = kv(engine)
        look("recalibrated")
    return seen


def test_the_first_prefill_sets_the_scales(history: dict[str, Any]) -> None:
    layout = {"format": "e4m3", "layers": LAYERS, "kv_heads": KV_HEADS}
    assert history["layout"]["kv_cache"] == layout
    start, first = history["kv start"], history["kv first"]
    assert start["pending"] and not first["pending"]
    assert torch.equal(torch.tensor(start["scales"]), START)
    for layer, statistics in zip(first["scales"], first["statistics"], strict=True):
        assert statistics["amax_k"] > 448  # there are outliers
        assert layer[0][0] * 448 > statistics["amax_k"]
        assert layer[0] == [layer[0][0]] * KV_HEADS  # one scale a layer
    assert clipped(first) == 0


def test_calibration_repairs_what_unit_scales_break(
    history: dict[str, Any], reference: list[float]
) -> None:
    unit, calibrated = (error(history[name], reference) for name in ("unit", "first"))
    print(f"error with unit scales {unit:.3f}, calibrated {calibrated:.3f}")
    assert clipped(history["kv unit"]) > 0
    assert unit > REPAIR * calibrated


def test_changed_scales_are_used_at_once(history: dict[str, Any]) -> None:
    assert history["unit"] != history["first"]
    assert history["brought"] == history["first"]
    assert history["kv brought"]["scales"] == history["kv first"]["scales"]
    assert history["unit again"] == history["unit"]


def test_decode_reads_what_prefill_reads(history: dict[str, Any], reference: list[float]) -> None:
    """The prompt that holds the decoded tokens is prefilled in two chunks, of which the first may
    come from the prefix cache."""
    apart = error(history["decoded"], history["prefilled"])
    cost = error(history["first"], reference)
    print(f"decode beside prefill {apart:.4f}, what FP8 KV costs {cost:.4f}")
    assert apart < FLIPS * cost
    assert history["hit"] == history["missed"]


def test_scales_that_are_refused(history: dict[str, Any]) -> None:
    """Of a wrong shape before anything is written; of bad values they are never in force."""
    assert "(2, 2, 3)" in history["wrong shape"]
    assert history["after wrong shape"] == history["unit"]
    assert "is nan" in history["nan"]
    assert "is -1.0" in history["negative"]
    assert history["layout nan"]["state"] == "quarantined"
    assert history["kv nan"]["scales"] == history["kv unit"]["scales"]


def test_an_update_without_scales_is_measured_anew(history: dict[str, Any]) -> None:
    assert history["kv healed"]["scales"] == history["kv first"]["scales"]
    assert history["healed"] == history["first"]
    # and on demand
    assert history["recalibrate"] == {"pending": True}
    assert history["kv recalibrate"]["pending"]
    assert history["recalibrated"] == history["first"]


def test_int8_needs_no_scales(qk_norm: Model, tmp_path: Path) -> None:
    chunked: dict[str, Any] = {"chunked_prefill_size": CHUNK}
    with EngineProcess(tmp_path / "reference.log", qk_norm.plain, **chunked) as engine:
        reference = score(engine)
    options = chunked | {"fp8rl_kv_cache": "int8"}
    with EngineProcess(tmp_path / "engine.log", qk_norm.plain, **options) as engine:
        rollout(engine, PROMPT[:1], 1)  # one token that comes first changes nothing
        first = score(engine)
        decoded, prefilled = decoded_and_prefilled(engine)
        report = kv(engine)
        assert (report["format"], report["scales"], clipped(report)) == ("int8", None, 0)
        engine.update(qk_norm.plain, 0)
        assert score(engine) == first
        with pytest.raises(EngineError, match="kv_scales"):
            engine.update(qk_norm.with_scales(ONES), 1)
        assert engine.control({"op": "layout"})["kv_cache"]["format"] == "int8"
        assert score(engine) == first
    apart, cost = error(decoded, prefilled), error(first, reference)
    print(f"decode beside prefill {apart:.4f}, what INT8 KV costs {cost:.4f}")
    assert apart < INT8_APART and cost < INT8_COST


@pytest.mark.full
def test_scales_of_a_file_of_names_and_of_a_trainer(tmp_path: Path) -> None:
    """QKV bias, no QK-norm, ``kv_scheme`` trainer."""
    model = Model("qwen2", tmp_path)
    reference = model.reference()
    by_hand = torch.tensor([8.0, 0.125]).view(2, 1).expand(LAYERS, 2, KV_HEADS)
    file = tmp_path / "scales.json"
    file.write_text(json.dumps({"scales": by_hand.tolist()}))
    options = FP8_KV | {"fp8rl_kv_scheme": "trainer", "fp8rl_kv_scales": str(file)}
    checkpoint = model.with_names(0.5, 0.5)  # the file wins
    with EngineProcess(tmp_path / "engine.log", checkpoint, **options) as engine:
        assert kv(engine)["scales"] == by_hand.tolist()
        from_file = score(engine)
        with pytest.raises(EngineError, match="brings no kv_scales"):
            engine.update(model.checkpoint, 0)
        assert score(engine) == from_file
        engine.update(model.with_names(16.0, 0.25), 0)
        layer = [[16.0] * KV_HEADS, [0.25] * KV_HEADS]
        assert kv(engine)["scales"] == [layer] * LAYERS
        engine.update(model.with_scales(ONES), 1)
        unit = score(engine)
        assert clipped(kv(engine)) > 0
        engine.update(model.with_scales(trainer_scales(model.checkpoint)), 2)
        from_trainer = score(engine)
        assert clipped(kv(engine)) == 0
    unit_error, *errors = (error(x, reference) for x in (unit, from_file, from_trainer))
    print(f"error with unit scales {unit_error:.3f}, with those of a file, a trainer {errors}")
    assert unit_error > REPAIR * max(errors)


@pytest.mark.full
def test_each_rank_keeps_its_heads_and_probes_do_not_calibrate(
    qk_norm: Model,
    history: dict[str, Any],
    tmp_path: Path,
) -> None:
    v_proj = {
        name: torch.cat([tensor[: models.HEAD_DIM], tensor[models.HEAD_DIM :] / 8])
        for name, tensor in models.named_tensors(qk_norm.checkpoint)
        if name.endswith("v_proj.weight")
    }
    checkpoint = models.with_tensors(qk_norm.checkpoint, tmp_path / "unlike heads", v_proj)
    flags = {"--tp-size": 2, "--kv-cache-dtype": "fp8_e4m3", "--chunked-prefill-size": CHUNK}
    arguments = [str(word) for pair in flags.items() for word in pair]
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(
        tmp_path / "server.log", FORKED, checkpoint, *arguments, environment=cores
    ) as server:
        # SGLang's warm-up has run, and stored some tokens
        assert kv(server)["statistics"][0]["tokens"] > 0
        assert server.status_of("/health_generate") == 200
        start = kv(server)
        assert start["pending"]
        assert torch.equal(torch.tensor(start["scales"]), START)

        score(server)
        report = kv(server)
        scales = torch.tensor(report["scales"])
        assert not report["pending"]
        # the first layer's K does not depend on how the ranks share the rest
        assert float(scales[0, 0].max()) == history["kv first"]["scales"][0][0][0]
        # of the larger head, which the other rank has
        assert torch.equal(scales, scales.amax(-1, keepdim=True).expand_as(scales))
        assert_held(server, scales)

        brought = torch.tensor([1.0, 0.25]).expand(LAYERS, 2, KV_HEADS)
        named = models.named_tensors(qk_norm.with_scales(brought))
        trainer_bridge.update(named, server, version=0)
        assert kv(server)["scales"] == ONES.tolist()
        assert_held(server, torch.ones_like(brought))


def assert_held(server: Server, scales: torch.Tensor) -> None:
    """Each of two ranks divides by the scales of its own head."""
    for rank, held in enumerate(server.control({"op": "digest"})["ranks"]):
        mine = scales[:, :, rank].T.contiguous().unsqueeze(-1)
        assert held["fp8rl_kv.store"]["shape"] == list(mine.shape)
        assert held["fp8rl_kv.store"]["sha256"] == hashlib.sha256(mine.numpy()).hexdigest()
