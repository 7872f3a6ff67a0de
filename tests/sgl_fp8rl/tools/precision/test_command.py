"""The command as a user runs it, and a fault that its ranking must find."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server_args import matches
from sgl_fp8rl.tools import cli
from sgl_fp8rl.tools.precision import command, tokens
from tests.engine import models
from tests.server_args.flags import parse

Checkpoint = Callable[[str], Path]
OUTLIER = 2.0**16
"""A channel so much larger than its neighbours leaves them nothing but E4M3's smallest numbers."""
WORSE = 3.0
"""By so much at least is the planted layer's damage larger; 6 to 20 here."""
TOKENS = 256


def run(model: Path, *more: str) -> int:
    return cli.main(["precision", str(model), "--tokens", str(TOKENS), "--device", "cpu", *more])


def report(model: Path, folder: Path, *more: str) -> dict[str, Any]:
    path = folder / "report.json"
    assert run(model, "--output", str(path), *more) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def found(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report(checkpoint("qwen3_moe"), tmp_path_factory.mktemp("report"))


def test_the_list_keeps_the_budget(found: dict[str, Any]) -> None:
    layers = found["layers"]
    assert len(layers) == 6 and found["tokens"] == TOKENS
    kls = [layer["kl"] for layer in layers]
    for_bytes = [layer["kl"] / layer["bf16_bytes"] for layer in layers]
    assert for_bytes == sorted(for_bytes, reverse=True) and for_bytes[-1] > 0
    names = [layer["name"] for layer in layers]
    ignored = found["ignored_layers"]
    assert 0 < len(ignored) < 6 and ignored == names[: len(ignored)]
    assert [layer["ignored"] for layer in layers] == [name in ignored for name in names]
    assert found["budget_kl"] == 0.5 * found["kl_all_fp8"]
    assert found["kl"] <= found["budget_kl"]
    measured = {tried["ignored"]: tried for tried in found["measured"]}
    assert measured[0]["kl"] == found["kl_all_fp8"]
    assert measured[0]["sum_of_layers"] == pytest.approx(sum(kls)) == found["kl_sum_of_layers"]
    assert measured[len(ignored)]["kl"] == found["kl"]


def test_the_flag_names_exactly_these_layers(found: dict[str, Any]) -> None:
    args = parse(shlex.split(found["flag"]), {})
    assert list(args.ignored_layers) == found["ignored_layers"]
    names = [layer["name"] for layer in found["layers"]]
    named = [name for name in names if any(matches(p, name) for p in args.ignored_layers)]
    assert named == found["ignored_layers"]
    other = "model.layers.10.self_attn.qkv_proj"
    assert not any(matches(pattern, other) for pattern in args.ignored_layers)


def plant(path: Path, to: Path, layer: int) -> Path:
    """A copy whose one MLP channel is huge between up and down, and the model's BF16 the same.

    Both factors are powers of two, so nothing is rounded differently.
    """
    shutil.copytree(path, to)
    tensors = load_file(to / models.WEIGHTS)
    mlp = f"model.layers.{layer}.mlp."
    for channel in (5, 131, 260, 400):  # one in each block
        tensors[f"{mlp}up_proj.weight"][channel] *= OUTLIER
        tensors[f"{mlp}down_proj.weight"][:, channel] /= OUTLIER
    save_file(tensors, to / models.WEIGHTS, metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("layer", [0, 1])
def test_a_planted_outlier_is_found(layer: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    healthy = report(checkpoint("qwen3"), tmp_path)
    planted = plant(checkpoint("qwen3"), tmp_path / "planted", layer)
    found = report(planted, tmp_path)
    gate_up, down = (f"model.layers.{layer}.mlp.{leaf}" for leaf in ("gate_up_proj", "down_proj"))
    assert found["layers"][0]["name"] == gate_up != healthy["layers"][0]["name"]
    assert gate_up in found["ignored_layers"] and gate_up not in healthy["ignored_layers"]
    before, after = (
        {one["name"]: one["kl"] for one in some["layers"]} for some in (healthy, found)
    )
    for name, kl in before.items():
        if name in (gate_up, down):
            assert after[name] > WORSE * kl
        else:  # the BF16 model is the same, to the last bit
            assert after[name] == kl


def fails(capsys: pytest.CaptureFixture[str], model: Path | str, *more: str) -> str:
    """The one sentence on stderr of a command that must fail."""
    assert run(Path(model), *more) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


def test_faults_are_sentences(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, prompts = checkpoint("qwen3"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "text"}\n')
    # this checkpoint has none
    assert "has no tokenizer" in fails(capsys, tiny, "--prompts", str(prompts))
    assert "config.json" in fails(capsys, tmp_path / "none")
    assert "--budget-kl" in fails(capsys, tiny, "--budget-kl", "nan")
    assert "--budget-kl" in fails(capsys, tiny, "--budget-kl", "-1")
    assert "--tokens" in fails(capsys, tiny, "--tokens", "0")
    assert "No such file" in fails(capsys, tiny, "--prompts", str(tmp_path / "none"))
    assert "No such file" in fails(capsys, tiny, "--output", str(tmp_path / "none" / "a.json"))
    assert "kv_a_proj_with_mqa" in fails(capsys, checkpoint("deepseek_v2"))
    if not torch.cuda.is_available():
        assert "--device cpu" in fails(capsys, tiny, "--device", "cuda")


def test_checkpoints_that_cannot_be_measured(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = shutil.copytree(checkpoint("qwen3"), tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps(config))
    assert "quantized" in fails(capsys, quantized)

    broken = shutil.copytree(checkpoint("qwen3"), tmp_path / "nan")
    tensors = load_file(broken / models.WEIGHTS)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, broken / models.WEIGHTS, metadata={"format": "pt"})
    assert "NaN or Inf" in fails(capsys, broken)

    strange = shutil.copytree(checkpoint("qwen3"), tmp_path / "strange")
    (strange / "config.json").write_text('{"model_type": "not-a-model"}')
    assert str(strange) in fails(capsys, strange)

    (broken / models.WEIGHTS).write_bytes(b"no safetensors")
    assert str(broken) in fails(capsys, broken)


def test_text_is_tokenized_as_the_model_does(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocab = {"a": 0, "sum": 1, "user": 2, "<unk>": 3, "<s>": 4}
    words = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template).save_pretrained(folder)
    tokenize = command.tokenizer(str(folder))
    assert tokenize("a sum a", begins=True) == [4, 0, 1, 0]
    assert tokenize("a sum a", begins=False) == [0, 1, 0]  # no BOS amid a sequence
    assert tokenize([{"role": "user", "content": "sum"}], begins=True) == [2, 1]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a sum"}\n{"prompt": "a", "response": "sum sum sum"}\n')
    found = report(folder, tmp_path, "--prompts", str(prompts))
    assert found["sequences"] == 2 and found["tokens"] == TOKENS
    first, second = tokens.read_texts(prompts, tokenize)
    assert first == tokens.Text([4, 0, 1], None) and second == tokens.Text([4, 0], [1, 1, 1])
