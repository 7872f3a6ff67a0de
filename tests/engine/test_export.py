"""``sgl-fp8rl export``: stock SGLang loads what was exported, and answers as the engine does.

The files are compared byte for byte with ``tests.oracle``. SGLang's own ``fp8`` reads config and
weights; on a CPU only its arithmetic is replaced (``stock_fp8.py``).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_fp8rl.tools import cli
from tests import oracle
from tests.engine import models, stock_fp8
from tests.engine.conftest import Policies
from tests.engine.harness import EngineProcess, exit_status, tail
from tests.engine.serving import ASK

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

SCORE = {**ASK, "return_logprob": True, "logprob_start_len": 0}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of an engine that runs without our quantization, as the checkpoint's config says."""
    monkeypatch.syspath_prepend(str(stock_fp8.install(tmp_path / "plugins")))
    return {"quantization": None}


def logprobs(engine: Any) -> list[float]:
    """Of the prompt but its first token, and of greedy output."""
    meta = engine.generate(SCORE)[0]["meta_info"]
    return [p[0] for p in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])]


def logprobs_of(log: Path, checkpoint: Path, **options: Any) -> list[float]:
    with EngineProcess(log, checkpoint, **options) as engine:
        return logprobs(engine)


def sha256(engine: EngineProcess) -> list[dict[str, str]]:
    """Of each tensor of each rank."""
    ranks = engine.control({"op": "digest"})["ranks"]
    return [{name: tensor["sha256"] for name, tensor in rank.items()} for rank in ranks]


def run_command(log: Path, *arguments: Any) -> None:
    """The command in a process of its own: a scheduler that dies takes its parent with it."""
    assert exit_status(log, cli.main, ["export", *map(str, arguments)]) == 0, tail(log)


def expected(checkpoint: Path, *, power_of_two: bool = False) -> models.Tensors:
    """What an export of this checkpoint holds; codes and scales are the oracle's."""

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = oracle.quantize_weight(weight.float().numpy(), power_of_two=power_of_two)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)

    return dict(models.fp8_stream(checkpoint, quantize))


def exported(folder: Path) -> models.Tensors:
    """All tensors, read through the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    assert {name for tensors in files.values() for name in tensors} == index.keys()
    return {name: files[file][name] for name, file in index.items()}


def assert_equal(found: models.Tensors, wanted: models.Tensors) -> None:
    def facts(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        return tensor.dtype, tensor.shape, content

    assert found.keys() == wanted.keys()
    assert [n for n in wanted if facts(found[n]) != facts(wanted[n])] == []


def swap_scales(folder: Path, copy: Path) -> Path:
    """The export with the scales of one matrix in another order of blocks."""
    shutil.copytree(folder, copy)
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if n.endswith("down_proj.weight_scale_inv"))
    tensors[name] = tensors[name].roll(1, dims=-1).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.full), "qwen3_moe"])
def test_stock_sglang_answers_as_the_engine(
    family: str, policies: Policies, stock: dict[str, Any], tmp_path: Path
) -> None:
    policy, fp8 = policies(family)[1], tmp_path / "fp8"
    run_command(tmp_path / "export.log", policy, fp8)
    assert_equal(exported(fp8), expected(policy))
    assert (fp8 / "generation_config.json").exists()
    engine = logprobs_of(tmp_path / "engine.log", policy)
    assert logprobs_of(tmp_path / "stock.log", fp8, **stock) == engine
    # the control: were the answers equal here, they would prove nothing
    swapped = swap_scales(fp8, tmp_path / "swapped")
    assert logprobs_of(tmp_path / "swapped.log", swapped, **stock) != engine


@pytest.mark.full
def test_layers_that_stay_bf16(stock: dict[str, Any], tmp_path: Path) -> None:
    """An MLP that is not whole blocks, an ignored layer, and a head tied to the embedding.

    Stock SGLang loads no padded layer.
    """
    bf16 = models.make_checkpoint(
        "qwen3", tmp_path / "bf16", tie_word_embeddings=True, intermediate_size=320
    )
    ignored = "layers.1.self_attn"
    run_command(tmp_path / "export.log", bf16, tmp_path / "fp8", "--ignored-layers", ignored)
    found = exported(tmp_path / "fp8")
    fp8 = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    assert fp8 == {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}

    log = tmp_path / "engine.log"
    options = {"fp8rl_ignored_layers": (ignored,), "fp8rl_ragged": "bf16"}
    with EngineProcess(log, bf16, **options) as engine:
        wanted, digest = logprobs(engine), sha256(engine)
    assert logprobs_of(tmp_path / "stock.log", tmp_path / "fp8", **stock) == wanted
    # our own engine reads the list in the export's config as well
    with EngineProcess(tmp_path / "again.log", tmp_path / "fp8") as engine:
        assert sha256(engine) == digest


def test_powers_of_two_are_exported_and_started_from(policies: Policies, tmp_path: Path) -> None:
    checkpoint, *_ = policies("qwen3_moe")
    quantized = tmp_path / "quantized"
    options = {"fp8rl_format": "block-fp8-ue8m0"}
    with EngineProcess(tmp_path / "log", checkpoint, **options) as engine:
        wanted, digest = logprobs(engine), sha256(engine)
    arguments = (checkpoint, quantized, "--format", options["fp8rl_format"])
    run_command(tmp_path / "export.log", *arguments)
    assert_equal(exported(quantized), expected(checkpoint, power_of_two=True))
    config = json.loads((quantized / "config.json").read_text())["quantization_config"]
    assert config["scale_fmt"] == "ue8m0"
    with EngineProcess(tmp_path / "again.log", quantized, **options) as engine:
        assert sha256(engine) == digest and logprobs(engine) == wanted
    # the control: activations are quantized otherwise by an engine without powers of two
    assert logprobs_of(tmp_path / "plain.log", quantized) != wanted


@pytest.mark.full
@pytest.mark.parametrize(("family", "tp_size"), [("qwen3", 1), ("smollm2", 1), ("qwen2_cut", 2)])
def test_a_block_fp8_checkpoint_starts_as_that_in_bf16(
    family: str, tp_size: int, tmp_path: Path
) -> None:
    """Also where ranks cut its blocks."""
    bf16 = models.make_checkpoint(family, tmp_path / "bf16")
    fp8 = tmp_path / "fp8"
    fp8.mkdir()
    config = json.loads((bf16 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    save_file(expected(bf16), fp8 / "model.safetensors")

    def started(path: Path) -> list[dict[str, str]]:
        with EngineProcess(tmp_path / f"{path.name}.log", path, tp_size) as engine:
            return sha256(engine)

    assert started(fp8) == started(bf16)
