"""Prompts that are read, and tokens that the model samples."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.tools.precision import tokens
from sgl_fp8rl.tools.precision.tokens import Text
from tests.sgl_fp8rl.tools.precision.conftest import Load

SAMPLES = 4000
MATCH = 0.05
"""Total variation between drawn tokens and the model's distribution of 8 likely ones, at most; 0.02
here. The control, the distribution at temperature 2, is 0.2 away."""


BOS = 99
NO_TOKENS = ('{"prompt": "  "}', '{"prompt": "a", "response": " "}')


def words(given: Any, /, *, begins: bool) -> list[int]:
    """A tokenizer: BOS and the length of each word, of chat messages that of each content."""
    if isinstance(given, list):
        return [len(message["content"]) for message in given]
    return [BOS] * (begins and bool(given.strip())) + [len(word) for word in given.split()]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a bc", "response": "def"},
        {"prompt": [4, 5]},
        {"prompt": [{"role": "user", "content": "hello"}], "response": [6, 7]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert tokens.read_texts(path, words) == [
        Text([BOS, 1, 2], [3]),
        Text([4, 5], None),
        Text([5], [6, 7]),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"text": "a"}',
        '{"prompt": ""}',
        '{"prompt": 4}',
        '["a"]',
        '{"prompt": []}',
        '{"prompt": ["a"]}',
        '{"prompt": [1, "a"]}',
        '{"prompt": [1.5]}',
        '{"prompt": [true]}',
        '{"prompt": [{"x": 1}]}',
        '{"prompt": [{"role": "user"}]}',
        '{"prompt": [{"role": "user", "content": "a"}, 1]}',
        '{"prompt": "a", "response": null}',
        '{"prompt": "a", "response": []}',
        '{"prompt": "a", "response": ["a"]}',
        '{"prompt": "a", "response": [{"role": "assistant", "content": "a"}]}',
        *NO_TOKENS,
    ],
)
def test_a_line_that_is_no_prompt(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"line 2 of .*prompts\.jsonl") as no:
        tokens.read_texts(path, words)
    assert line not in NO_TOKENS or "token" in str(no.value)
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl.*at least one"):
        tokens.read_texts(path, words)


def test_from_nothing(load: Load) -> None:
    model = load("qwen3")
    drawn = tokens.from_nothing(model, 300, seed=0)
    assert len(drawn) == 3 and {len(text.prompt) for text in drawn} == {1}
    assert drawn == tokens.from_nothing(model, 300, 0) != tokens.from_nothing(model, 300, 1)
    model.config.bos_token_id = 17
    assert tokens.from_nothing(model, 129, 0) == [Text([17], None)] * 2


def test_samples_begin_with_their_prompts_and_depend_on_the_seed(load: Load) -> None:
    model = load("qwen3")
    prompts = [[1, 2, 3, 4, 5, 6], [9], [7, 8]]
    found = tokens.sample(model, prompts, 5, seed=3)
    assert [text.prompt for text in found] == prompts
    assert all(text.response is not None and len(text.response) == 5 for text in found)
    assert found == tokens.sample(model, prompts, 5, seed=3) != tokens.sample(model, prompts, 5, 4)


def test_samples_are_of_the_models_distribution(load: Load) -> None:
    """Also behind a prompt that is longer than its neighbour's, at temperature 1 and no other."""
    model = load("qwen3")
    prompt = [3, 1, 4, 1, 5]
    found = tokens.sample(model, [prompt] * SAMPLES + [[2]], 1, seed=0)
    drawn = torch.tensor([text.response for text in found[:-1]]).flatten()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1].float()
    likely = logits.topk(8).indices
    counts = (drawn[:, None] == likely).float().mean(0)
    assert 0.5 * (counts - logits.softmax(-1)[likely]).abs().sum() < MATCH
    assert 0.5 * (counts - (logits / 2).softmax(-1)[likely]).abs().sum() > MATCH


def test_a_response_ends_with_the_token_that_ends_texts(load: Load) -> None:
    model = load("qwen3")
    (free,) = tokens.sample(model, [[1, 2]], 20, seed=0)
    assert free.response is not None
    model.generation_config.eos_token_id = [free.response[7], 999]
    (cut,) = tokens.sample(model, [[1, 2]], 20, seed=0)
    first = free.response.index(free.response[7])
    assert cut.response == free.response[: first + 1]


def test_as_many_texts_as_tokens_are_asked_for(load: Load) -> None:
    model = load("qwen3")
    given = [Text([1], [2] * 40), Text([3], [4] * 40), Text([5], [6] * 40)]
    assert tokens.complete(model, given, 50, 0) == given[:2]
    asked = [Text([n], None) for n in range(9)]
    some = tokens.complete(model, asked, 130, 0)
    assert [text.prompt for text in some] == [[0], [1], [2]]
    assert [len(text.response or []) for text in some] == [64, 64, 64]
    long = tokens.complete(model, [*given[:1], asked[7]], 240, 0)
    assert [len(text.response or []) for text in long] == [40, 200]
    with pytest.raises(ValueError, match=r"vocabulary.*\b512\b"):
        tokens.complete(model, [Text([512], [1])], 10, 0)


def test_short_responses_are_made_up_for(load: Load) -> None:
    """Every second token ends a text, so a response has about two; no sample is a copy."""
    model = load("qwen3")
    model.generation_config.eos_token_id = list(range(0, 512, 2))
    found = tokens.complete(model, [Text([1], None), Text([3, 4], None)], 100, 0)
    assert 100 <= sum(len(text.response or []) for text in found) < 150
    assert {tuple(text.prompt) for text in found} == {(1,), (3, 4)}
    assert len({tuple(text.response or []) for text in found}) > 20


def test_batches_measure_responses_only() -> None:
    texts = [Text([1, 2, 3], [4, 5]), Text([6], [7])]
    (batch,) = tokens.batches_of(texts, torch.device("cpu"))
    assert batch.tokens_BL.tolist() == [[6, 7, 0, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.tokens_BL[:, 1:][batch.measured].tolist() == [7, 4, 5]


def test_nan_logits_are_refused(load: Load) -> None:
    model = load("qwen3")
    model.lm_head.weight.data[5] = torch.inf
    with pytest.raises(ValueError, match=r"logits.*NaN or Inf"):
        tokens.sample(model, [[1]], 3, 0)
