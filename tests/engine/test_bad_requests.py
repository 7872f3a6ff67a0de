"""One bad request costs one request, in process and over HTTP, while others decode; and grammars on
the CPU platform, by SGLang's own tests of them."""

import json
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.engine import models
from tests.engine.bad_requests import VOCAB, WRONG_IDS, WRONG_SAMPLING
from tests.engine.conftest import Policies
from tests.engine.harness import CALL_TIMEOUT_S, FORKED, EngineProcess, Server
from trainer_bridge.engines.engine_client import EngineError

# Two engines start, one after the other.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONG = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
EOS = "<|end|>"
FIRST = '"}:,)].0123456789 '
"""What the model of the grammars prefers, in this order: it ends whatever may end."""


@pytest.fixture(scope="module")
def engine(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("requests") / "engine.log"
    options = {"kv_cache_dtype": "fp8_e4m3", "log_level": "info"}
    with EngineProcess(log, policies("qwen3")[0], **options) as started:
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("grammars")
    checkpoint = make_checkpoint(folder / "model")
    with Server(folder / "server.log", FORKED, checkpoint, has_tokenizer=True) as started:
        yield started


def make_checkpoint(path: Path) -> Path:
    """A model that prefers tokens by their ids, whatever it read, and its tokenizer of bytes."""
    models.make_checkpoint("qwen3", path)
    tensors = dict(models.named_tensors(path))
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = torch.zeros_like(tensor)
        elif "embed_tokens" in name or name == "model.norm.weight":
            tensors[name] = torch.ones_like(tensor)
    head = tensors["lm_head.weight"]
    logits_V = -4.0 * torch.arange(len(head))
    tensors["lm_head.weight"] = (logits_V[:, None] / head.shape[1]).expand_as(head).to(head.dtype)
    models._save(path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(FIRST.replace(" ", "Ġ")))
    order = [EOS, *FIRST.replace(" ", "Ġ"), *rest]
    tokenizer = Tokenizer(BPE(vocab={text: i for i, text in enumerate(order)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    return path


@pytest.fixture(params=["in process", "over HTTP"])
def client(request: pytest.FixtureRequest) -> EngineProcess | Server:
    name = {"in process": "engine", "over HTTP": "server"}[request.param]
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


@pytest.mark.guarantee("rollouts", fault="a token id that the model does not have")
@pytest.mark.guarantee("rollouts", fault="a sampling parameter of a wrong kind")
def test_a_bad_request_fails_alone(client: EngineProcess | Server) -> None:
    """Two decode meanwhile, in front of the others and behind them."""
    wrong: list[dict[str, Any]] = [
        *({"input_ids": ids, "sampling_params": LONG} for ids in WRONG_IDS),
        *(
            {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8} | bad}
            for bad in (*WRONG_SAMPLING, {"stop_regex": "("})
        ),
    ]
    good = {"input_ids": [1, 2, 3], "sampling_params": LONG}
    first, *refused, last = client.sample([good, *wrong, good], CALL_TIMEOUT_S)
    for reply in (first, last):
        assert isinstance(reply, dict), reply
        assert len(reply["output_ids"]) == LONG["max_new_tokens"]
    for request, reply in zip(wrong, refused, strict=True):
        assert isinstance(reply, EngineError), (request, reply)
        assert reply.status == 400, (request, reply)
    for reply, said in zip(refused, WRONG_IDS[:6], strict=False):
        assert f"vocabulary has {VOCAB}" in str(reply), (said, reply)


@pytest.mark.guarantee("rollouts", fault="a bad prompt in a batch of one call")
def test_a_bad_prompt_of_a_batch(client: EngineProcess | Server) -> None:
    """SGLang answers a call as a whole; the next one is served."""
    for bad in ([VOCAB], [-1]):
        with pytest.raises(EngineError, match="vocabulary") as refusal:
            client.generate({"input_ids": [[1], bad, [2]], "sampling_params": LONG})
        assert refusal.value.status == 400
    replies = client.generate({"input_ids": [[1], [2]], "sampling_params": LONG})
    assert [len(reply["output_ids"]) for reply in replies] == [LONG["max_new_tokens"]] * 2


def test_refusals_in_the_middle_of_a_streamed_reply(server: Server) -> None:
    running = server.stream({"input_ids": [1, 2], "sampling_params": LONG})
    next(running)
    (event,) = server.stream({"input_ids": [VOCAB], "sampling_params": LONG})
    assert "vocabulary" in event["meta_info"]["finish_reason"]["message"]
    with pytest.raises(EngineError) as refusal:
        server.generate({"input_ids": [1], "sampling_params": {"top_k": 1.5}})
    assert refusal.value.status == 400
    *_, last = running
    assert last["meta_info"]["completion_tokens"] == LONG["max_new_tokens"]


@pytest.mark.guarantee("malformed", fault="control messages that no route of ours sends")
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"message": None},
        {"message": "{}"},
        {"message": "[1]"},
        {"message": '{"op": ["kv"]}'},
        {"message": '{"op": "export_layout", "manifest": 5}'},
    ],
    ids=str,
)
def test_a_message_by_sglangs_rpc(engine: EngineProcess, parameters: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        engine.rpc(parameters)
    assert engine.control({"op": "status"})["state"] == "serving"


@pytest.mark.parametrize("kit", [JSONConstrainedMixin, RegexConstrainedMixin])
def test_grammars_by_sglangs_own_kit(server: Server, kit: type) -> None:
    case: Any = type("Kit", (kit, unittest.TestCase), {"base_url": server.address, "model": "m"})
    result = unittest.defaultTestLoader.loadTestsFromTestCase(case).run(unittest.TestResult())
    assert not result.errors + result.failures, [
        text for _, text in result.errors + result.failures
    ]
    assert result.testsRun >= 4
