"""Logprobs and entropies in chunks through the head, beside those of all logits and float64."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.trainer_bridge import ranks
from tests.trainer_bridge.moe_models import random_experts, tiny
from trainer_bridge import Rollout, response_logprobs
from trainer_bridge.rollouts import chunks, head
from trainer_bridge.router_replay import replay_routing

VOCAB = 61
PROMPTS = [[5, 43, 53, 60], [50], [7, 8], []]
RESPONSES = [[56, 10], [52, 44, 53, 10, 3], [], []]
TEMPERATURE = 0.7
GRADIENT = 1e-5
"""Between FP32 gradients in another order, of the largest. Healthy: 1e-6."""
FURTHER = 1.5
"""The error of chunks, of that of all logits. Healthy: 0.4 to 1.2 in FP32, 0.8 to 1.2 in BF16."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
}
Scores = tuple[torch.Tensor, torch.Tensor]


def model_of(name: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | more | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # logits of some size
        model.get_output_embeddings().weight.mul_(30)
    return model.to(dtype)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3 * 4 * VOCAB)  # three tokens


def scores(model: Any) -> Scores:
    return response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE, entropy=True)


def whole(model: Any) -> Scores:
    """By all logits at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_head_of", lambda _: (None, chunks.After()))
        return scores(model)


def exact(model: Any) -> Scores:
    """Of a float64 model: sequence by sequence without padding, by sums over the vocabulary."""
    found = torch.zeros(2, len(RESPONSES), max(map(len, RESPONSES)), dtype=torch.float64)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t, token in enumerate(response):
            ids = torch.tensor([[*prompt, *response[:t]]])
            powers_V = (model(ids).logits[0, -1] / TEMPERATURE).exp()
            chances_V = powers_V / powers_V.sum()
            found[0, row, t] = chances_V[token].log()
            found[1, row, t] = -sum(p * p.log() for p in chances_V)
    return found[0], found[1]


def gradients(model: Any, found: Scores) -> list[torch.Tensor]:
    weights_BT = torch.arange(found[0].numel()).view_as(found[0]) - 5.0
    (found[0] * weights_BT + found[1] * weights_BT.flip(0)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return grads


def in_chunks(model: Any) -> bool:
    return model in head._known and head._known[model][2]


def check_as_whole(model: Any) -> None:
    mine, plain = scores(model), whole(model)
    torch.testing.assert_close(mine, plain, atol=1e-5, rtol=0)
    for a, b in zip(gradients(model, mine), gradients(model, plain), strict=True):
        torch.testing.assert_close(a, b, atol=GRADIENT * float(b.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_as_near_to_float64_as_of_all_logits(
    name: str, dtype: torch.dtype
) -> None:
    model = model_of(name, dtype)
    mine, plain = scores(model), whole(model)
    assert in_chunks(model)
    double = model_of(name, dtype).double()
    wanted = exact(double)
    assert [x.dtype for x in mine] == [torch.float32] * 2
    pairs = [(mine, plain, wanted)]
    pairs.append((gradients(model, mine), gradients(model, plain), gradients(double, wanted)))
    for found, beside, true in pairs:
        assert off(found, true) <= FURTHER * off(beside, true)


def off(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The relative error of several tensors."""
    errors = [(a - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).detach().norm())


class Around(nn.Module):
    """A model that does something with its logits, or around them."""

    def __init__(self, inner: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, tokens_BL: torch.Tensor, **keywords: Any) -> Any:
        logits = self.inner(tokens_BL, **keywords).logits
        return SimpleNamespace(logits=self.change(logits))


def of_batch(logits: torch.Tensor) -> torch.Tensor:
    return logits.view(len(PROMPTS), -1, VOCAB)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded vocabulary": lambda x: x[..., : VOCAB - 1],
    "a token masked": lambda x: x.index_fill(-1, torch.tensor([3]), -1e4),
    "a factor": lambda x: x * (1 + 1e-5),
    "a factor in place": lambda x: x.mul_(2),
    "a bias": lambda x: x + 1e-3,
    "negative ones": lambda x: nn.functional.leaky_relu(x, 0.9),
    "a cap": lambda x: 1e4 * torch.tanh(x / 1e4),
    "tokens together": lambda x: x - x.mean(1, keepdim=True),
    "the shape of the batch": of_batch,
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes_its_logits_computes_all_of_them(
    change: Callable[[torch.Tensor], torch.Tensor],
    several: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(head, "_several", lambda: several)
    model = Around(model_of(), change)
    for _ in range(2):
        assert all(map(torch.equal, scores(model), whole(model)))
    assert not in_chunks(model)
    assert caplog.text.count("that is not known here") == 1


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_a_config_that_does_not_tell_what_a_model_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks.After, "of", lambda _: chunks.After())
    model = model_of(name)
    assert all(map(torch.equal, scores(model), whole(model)))
    assert not in_chunks(model)


def test_an_index_into_the_vocabulary_alone_is_no_change() -> None:
    model = Around(model_of(), lambda x: x if x[..., VOCAB - 1].numel() else x[..., :1])
    check_as_whole(model)
    assert in_chunks(model)


def test_a_model_that_changes_after_its_first_call() -> None:
    model = model_of("granite")
    scores(model)
    model.config.logits_scaling = 2.0  # is looked at
    check_as_whole(model)
    assert in_chunks(model)
    model = Around(model_of(), lambda x: x)
    scores(model)
    model.change = CHANGES["a bias"]  # is seen
    with pytest.raises(RuntimeError, match="call again"):
        scores(model)
    assert all(map(torch.equal, scores(model), whole(model)))


def test_the_instance_s_own_forward_stays() -> None:
    model = model_of()
    own = model.lm_head.forward = lambda hidden: 2 * nn.Linear.forward(model.lm_head, hidden)
    check_as_whole(model)
    assert vars(model.lm_head)["forward"] is own and not in_chunks(model)
    hooks = pytest.importorskip("accelerate").hooks
    model = model_of()
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu"))
    own = model.lm_head.forward
    check_as_whole(model)
    assert vars(model.lm_head)["forward"] is own and not in_chunks(model)


def test_other_heads_run_as_they_are() -> None:
    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return -super().forward(input)

    hooked, observed, other = model_of(), model_of(), model_of()
    observed.lm_head.register_full_backward_hook(lambda module, of_input, of_output: None)
    hooked.lm_head.register_forward_hook(lambda module, args, output: output + 1e-9)
    other.lm_head.__class__ = Other
    compiled = torch.compile(model_of())
    for model in (hooked, observed, other, compiled):
        assert head._head_of(model)[0] is None  # type: ignore[arg-type]
    check_as_whole(other)


def test_what_runs_before_the_product_runs_as_ever() -> None:
    model = model_of()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    parametrizations.weight_norm(model.lm_head)
    with torch.autograd.graph.save_on_cpu():
        check_as_whole(model)
    assert in_chunks(model) and model.lm_head.parametrizations.weight.original0.grad is None
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert all(x[:2, 0].isnan().all() for x in scores(model))


class Twice(nn.Module):
    """Two heads in one, as of tokens further on."""

    config = None

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens_BL: torch.Tensor, **keywords: Any) -> Any:
        hidden = self.inner.model(tokens_BL, **keywords).last_hidden_state
        later = self.inner.lm_head(hidden.roll(1, 1))
        return SimpleNamespace(logits=self.inner.lm_head(hidden), later=later)


def test_a_head_that_is_called_twice() -> None:
    model = Twice(model_of())
    check_as_whole(model)
    assert not in_chunks(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_head(reentrant: bool) -> None:
    class Checkpointed(Twice):
        def forward(self, tokens_BL: torch.Tensor, **keywords: Any) -> Any:
            hidden = self.inner.model(tokens_BL, **keywords).last_hidden_state
            run = self.inner.lm_head
            return SimpleNamespace(logits=checkpoint(run, hidden, use_reentrant=reentrant))

    check_as_whole(Checkpointed(model_of()))


def test_a_frozen_head_and_checkpointed_layers() -> None:
    model = model_of()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train().lm_head.requires_grad_(False)
    check_as_whole(model)
    assert in_chunks(model)
    scores(model)[1].sum().backward()  # entropy alone
    assert model.lm_head.weight.grad is None


def test_a_bias_and_autocast_to_bf16() -> None:
    model = model_of()
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, VOCAB))
    check_as_whole(model)
    with torch.autocast("cpu", torch.bfloat16):
        mine, plain = scores(model), whole(model)
    assert in_chunks(model)
    torch.testing.assert_close(mine, plain, atol=1e-4, rtol=0)  # the same rounded logits
    for a, b in zip(gradients(model, mine), gradients(model, plain), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=0.02 * float(b.abs().max()), rtol=0)


def test_hidden_states_on_another_device_than_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model over several devices; "meta" has no values to look at."""
    model = model_of()
    model.lm_head.to("meta")
    model.model.norm.register_forward_hook(lambda module, args, output: output.detach().to("meta"))
    monkeypatch.setitem(head._known, model, (ref(model.lm_head), chunks.After(), True))
    monkeypatch.setattr(head._Pass, "is_known", lambda own, output: own.found is not None)
    found = scores(model)
    assert {x.device.type for x in found} == {"meta"} and found[0].shape == (4, 5)
    sum(found).sum().backward()  # type: ignore[union-attr]


def test_an_error_in_the_model_leaves_its_head() -> None:
    model = model_of()
    handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            scores(model)
        assert "forward" not in vars(model.lm_head)
        handle.remove()
        scores(model)
        assert in_chunks(model)  # the error told nothing of its logits
        handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)


def test_memory_that_is_short_once_tells_nothing_of_a_model() -> None:
    """Also behind the head, where an error may be of a model that reads its logits."""
    errors = [torch.OutOfMemoryError("short")]

    def change(logits: torch.Tensor) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return logits

    model = Around(model_of(), change)
    with pytest.raises(torch.OutOfMemoryError):
        scores(model)
    check_as_whole(model)
    assert in_chunks(model)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    for target, is_plain in (("q_proj", True), ("lm_head", False)):
        config = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
        model = peft.get_peft_model(model_of(), config)
        check_as_whole(model)
        assert in_chunks(model) is is_plain


@pytest.mark.parametrize("several", [False, True])
def test_the_first_call_draws_no_random_numbers_and_may_be_replayed(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "_several", lambda: several)
    passes = []
    model = tiny(attention_dropout=0.5).train()
    model.model.norm.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    prompts, responses = [[1, 2], [3]], [[4, 5], [6]]
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    experts = [random_experts(3, 0), random_experts(1, 1)]
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        with replay_routing(model, experts, attention_mask=mask):
            found.append(response_logprobs(model, prompts, responses))
        assert in_chunks(model) and model.training
    assert torch.equal(*found)
    assert passes == [False] * several + [True] * 2


def test_without_gradient_by_micro_batches() -> None:
    model = model_of()
    rollout = Rollout(
        prompt_tokens=PROMPTS[:2], tokens=RESPONSES[:2], logprobs=[[], []], versions=[[], []],
        groups=[0, 1], finish_reasons=["stop"] * 2, errors={}, temperature=TEMPERATURE, texts=None,
    )  # fmt: skip
    with torch.no_grad():
        found = response_logprobs(model, rollout, entropy=True, micro_batch_tokens=6)
    torch.testing.assert_close(found, tuple(x[:2] for x in whole(model)))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    vocabulary, responses = 4096, [[2] * 32] * 8
    model = model_of(vocab_size=vocabulary)
    for patched, least in ((False, vocabulary * SIZES["hidden_size"]), (True, vocabulary * 8 * 32)):
        with pytest.MonkeyPatch.context() as patch, Largest() as largest:
            if patched:
                patch.setattr(head, "_head_of", lambda _: (None, chunks.After()))
            sum(response_logprobs(model, [[1]] * 8, responses, entropy=True)).sum().backward()
        assert largest.elements >= least  # the head's weight, or the logits
        assert patched or largest.elements == least


def of_rank(rank: int, folder: Path) -> None:
    """The first rank's rows have no token: it has another number of sequences and of tokens."""
    kinds = {path.name for path in folder.iterdir()}
    model: Any = model_of()
    if "one cannot" in kinds:  # which of the other rank's shape is seen as no change
        model.register_forward_hook(view_of_batch)
    if "ddp" in kinds:
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward="reshard" in kinds)
        if "head apart" in kinds:
            fully_shard(model.lm_head, reshard_after_forward="reshard" in kinds)
        fully_shard(model, reshard_after_forward="reshard" in kinds)
    mine = slice(0, 2) if rank else slice(2, 4)
    autocast = "autocast" in kinds  # whose cache must not keep what the first pass left
    for _ in range(1 if autocast else 2):
        model.zero_grad()
        given = PROMPTS[mine], RESPONSES[mine], TEMPERATURE
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = response_logprobs(model, *given, entropy=True)
        ((found[0] + found[1]).sum() * 2).backward()  # which FSDP and DDP average
    assert in_chunks(model) is not ("one cannot" in kinds and rank == 1)
    grads = [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()]
    torch.save(grads, folder / f"of {rank}")


def view_of_batch(module: nn.Module, args: tuple[torch.Tensor], output: Any) -> None:
    output.logits = output.logits.view(*args[0].shape, VOCAB)


@pytest.mark.parametrize(
    "kinds",
    [
        (),
        ("reshard",),
        ("reshard", "head apart"),
        ("reshard", "autocast"),
        ("ddp",),
        ("ddp", "autocast"),
        ("one cannot",),
    ],
    ids=str,
)
def test_ranks_have_the_gradient_of_the_whole(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        (tmp_path / kind).touch()
    ranks.run(of_rank, tmp_path, 2, 60.0)
    model, autocast = model_of(), "autocast" in kinds
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logprobs_BT, entropy_BT = whole(model)
    (logprobs_BT + entropy_BT).sum().backward()
    for found, parameter in zip(torch.load(tmp_path / "of 1"), model.parameters(), strict=True):
        size = float(parameter.grad.abs().max())
        most = 0.03 if autocast else GRADIENT
        torch.testing.assert_close(found, parameter.grad, atol=most * size, rtol=0)
