"""What ``watch`` sees in real transformers models, held against k and v computed by hand."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.trainer_bridge import moe_models
from tests.trainer_bridge.test_fsdp import WORLD, failure, gathered, run, sharded
from tests.trainer_bridge.test_kv_calibrator import measured
from trainer_bridge.kv import attention_hooks
from trainer_bridge.kv.kv_calibrator import KVCalibrator

pytestmark = pytest.mark.timeout(180)

LAYERS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 2, 16, moe_models.VOCAB
SHAPE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "head_dim": HEAD_DIM},
    **{"num_hidden_layers": LAYERS, "pad_token_id": 0},
}
FAMILIES = ("qwen3", "qwen2")
ATTENTIONS = ("eager", "sdpa")


def tiny(family: str = "qwen3", attention: str = "sdpa", **changes: Any) -> Any:
    """Norms and biases are random, or a norm that is left out would not show."""
    model = moe_models.tiny(family, attn_implementation=attention, **{**SHAPE, **changes})
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.uniform_(parameter, 0.2, 3.0)
    return model


def tokens(seed: int = 0, count: int = 9) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, count), generator=torch.Generator().manual_seed(seed))


def padded(left: bool) -> torch.Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 4) if left else slice(5, 9)] = 0
    return mask


# -- by hand: float64, from the hidden states of each layer


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def rotated(x_BTHD: torch.Tensor, positions_T: torch.Tensor, base: float) -> torch.Tensor:
    """Each pair of channels (i, i + D/2) turned by position * base^(-2i/D)."""
    half = HEAD_DIM // 2
    angles = positions_T[:, None] * base ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x_BTHD[..., :half], x_BTHD[..., half:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


@torch.no_grad()
def by_hand(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    rope: bool = True,
    norm: bool = True,
) -> torch.Tensor:
    """The amax of K and V ``[layers, 2, KV heads]`` in float64, of all tokens that count."""
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    found = []
    for layer, hidden in zip(model.model.layers, states, strict=False):
        x = rms_norm(hidden.double(), layer.input_layernorm.weight)
        rows = {}
        for name in "kv":
            linear = getattr(layer.self_attn, f"{name}_proj")
            y = x @ linear.weight.double().T
            y = y if linear.bias is None else y + linear.bias.double()
            rows[name] = y.unflatten(-1, (-1, HEAD_DIM))
        if norm and hasattr(layer.self_attn, "k_norm"):
            rows["k"] = rms_norm(rows["k"], layer.self_attn.k_norm.weight)
        if rope:
            base = model.config.rope_parameters["rope_theta"]
            rows["k"] = rotated(rows["k"], torch.arange(ids.shape[1]).double(), base)
        counts = torch.ones_like(ids) if mask is None else mask
        found.append(torch.stack([rows[n][counts.bool()].abs().amax((0, 2)) for n in "kv"]))
    return torch.stack(found)


def seen(model: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The amax ``[layers, 2, KV heads]`` that ``watch`` finds in one forward, and its logits."""
    calibrator = KVCalibrator.of(model)
    with torch.no_grad(), calibrator.watch(model):
        logits = model(*arguments, **options).logits
    return measured(calibrator), logits


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found / expected - 1).abs().max())


NEAR = 5e-6
"""Relative; FP32 against float64, measured 4.2e-7 at most."""


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_it_sees_what_attention_gets(family: str, attention: str, padding: str) -> None:
    """The controls, K before RoPE or before its norm, are other numbers."""
    model, ids = tiny(family, attention), tokens()
    mask = None if padding == "none" else padded(padding == "left")
    found, _ = seen(model, ids, attention_mask=mask)
    expected = by_hand(model, ids, mask)
    assert found.shape == expected.shape == (LAYERS, 2, KV_HEADS)
    assert off(found, expected) < NEAR
    wrong = [by_hand(model, ids, mask, rope=False)]
    if family == "qwen3":
        wrong.append(by_hand(model, ids, mask, norm=False))
    if mask is not None:
        wrong.append(by_hand(model, ids))
    for control in wrong:
        assert off(found[:, 0], control[:, 0]) > 100 * NEAR  # of K


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_the_same_bits(family: str, attention: str) -> None:
    model = tiny(family, attention, attention_dropout=0.3).train()
    ids, mask = tokens(), padded(True)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step()
    for percentile in (None, 99.0):
        with KVCalibrator.of(model, percentile=percentile).watch(model):
            assert all(torch.equal(a, b) for a, b in zip(step(), plain, strict=True))


@pytest.fixture
def unwatched() -> Iterator[Callable[[], bool]]:
    """Whether nobody watches, and transformers has the functions that it had; at the end so."""
    utils = pytest.importorskip("transformers.modeling_utils")
    functions = dict(utils.ALL_ATTENTION_FUNCTIONS)

    def is_unwatched() -> bool:
        return not attention_hooks._watches and dict(utils.ALL_ATTENTION_FUNCTIONS) == functions

    yield is_unwatched
    assert is_unwatched()


def hooks(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    )


def test_nothing_is_left_behind(unwatched: Callable[[], bool]) -> None:
    model = tiny()
    calibrator, before = KVCalibrator.of(model), hooks(model)
    with calibrator.watch(model):
        assert not unwatched() and hooks(model) > before
        model(tokens())
    assert unwatched() and hooks(model) == before
    with pytest.raises(IndexError), calibrator.watch(model):
        model(tokens() + VOCABULARY)
    assert unwatched() and hooks(model) == before
    calibrator.scales()
    model(tokens())
    with pytest.raises(ValueError, match=r"layer 0 .*tokens"):
        calibrator.scales()


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_takes_its_mask_along(fails: bool) -> None:
    """Also one that failed. The next has none; an older one would not fit. A trainer that needs
    hidden states calls the decoder alone; the control counts its padding."""
    model, ids, mask, other = tiny(), tokens(), padded(True), tokens(seed=1, count=5)
    calibrator = KVCalibrator.of(model)
    with torch.no_grad(), calibrator.watch(model):
        with suppress(IndexError):
            model.model(ids + fails * VOCABULARY, attention_mask=mask)
        model.model(other)
    expected = by_hand(model, other)
    if not fails:
        expected = torch.maximum(expected, by_hand(model, ids, mask))
        assert off(torch.maximum(expected, by_hand(model, ids)), expected) > 0.01
    assert off(measured(calibrator), expected) < NEAR


def test_each_watch_sees_its_own_model(unwatched: Callable[[], bool]) -> None:
    """A trainer has a reference model too; they may end in any order."""
    policy, reference, ids = tiny(), tiny(seed=1), tokens()
    again = 3 * ids % VOCABULARY
    calibrators = [KVCalibrator.of(m) for m in (policy, reference, policy)]
    with torch.no_grad(), ExitStack() as first, ExitStack() as others:
        first.enter_context(calibrators[0].watch(policy))
        others.enter_context(calibrators[1].watch(reference))
        others.enter_context(calibrators[2].watch(policy))
        policy(ids)
        first.close()
        policy(again)
        reference(ids)
    expected = [by_hand(policy, ids), by_hand(reference, ids)]
    expected.append(torch.maximum(expected[0], by_hand(policy, again)))
    for calibrator, oracle in zip(calibrators, expected, strict=True):
        assert off(measured(calibrator), oracle) < NEAR
    assert off(expected[0], expected[2]) > 0.01


class Wrapper(nn.Module):
    """As DistributedDataParallel: takes whatever comes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Outer(Wrapper):
    """Gives a decoder masks of another kind than its own, which tells the padding."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        causal = torch.ones(9, 9, dtype=torch.bool).tril()
        full = causal & attention_mask[:, None, None].bool() | torch.eye(9, dtype=torch.bool)
        return self.module(input_ids, attention_mask={"full_attention": full})


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, Outer])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_the_mask_is_found_however_it_is_given(wrap: Any, dtype: torch.dtype) -> None:
    model, ids, mask = tiny(), tokens(), padded(True)
    found, _ = seen(wrap(model), ids, mask.to(dtype))
    assert off(found, by_hand(model, ids, mask)) < NEAR


def test_another_attention_function_is_watched_too(unwatched: Callable[[], bool]) -> None:
    """One that a user registered, with a mask function of another."""
    utils = pytest.importorskip("transformers.modeling_utils")
    mine = Mock(wraps=utils.ALL_ATTENTION_FUNCTIONS["sdpa"])
    model, ids = tiny(), tokens()
    plain = model(ids).logits
    utils.ALL_ATTENTION_FUNCTIONS["mine"] = mine
    try:
        model.config._attn_implementation = "mine"
        found, logits = seen(model, ids)
    finally:
        del utils.ALL_ATTENTION_FUNCTIONS["mine"]
    assert [call.args[0].layer_idx for call in mine.mock_calls] == list(range(LAYERS))
    assert torch.equal(logits, plain)
    model.config._attn_implementation = "sdpa"
    assert off(found, by_hand(model, ids)) < NEAR


def test_a_vision_tower_is_not_observed() -> None:
    """Its heads are others, and so is its configuration."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.Qwen3Config(**{**moe_models.TINY, **SHAPE}),
        vision_config=transformers.SiglipVisionConfig(
            **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
            **{"num_hidden_layers": 5, "num_attention_heads": 4, "image_size": 8, "patch_size": 4},
        ),
        image_token_index=1,
        vision_feature_select_strategy="full",
        image_seq_length=4,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    towers = [m for m in model.modules() if type(m).__name__ == "SiglipAttention"]
    for index, tower in enumerate(towers):
        tower.layer_idx = index  # as those of other towers have
    assert len(towers) == 5
    calibrator = KVCalibrator.of(model)
    assert (calibrator.layers, calibrator.kv_heads) == (LAYERS, KV_HEADS)
    ids = tokens()
    ids[ids == 1] = 2
    ids[:, :4] = 1
    with torch.no_grad(), calibrator.watch(model):
        model(input_ids=ids, pixel_values=torch.randn(2, 3, 8, 8))
    assert calibrator.scales().shape == (LAYERS, 2, KV_HEADS)


# -- refused


def test_masks_and_caches_that_do_not_fit() -> None:
    model = tiny()
    full = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    with torch.no_grad(), KVCalibrator.of(model).watch(model):
        for mask in (full, {"full_attention": full}):
            with pytest.raises(ValueError, match=r"attention_mask.*\[batch, tokens\]"):
                model(tokens(), attention_mask=mask)
        cache = model(tokens(), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="earlier tokens"):
            model(tokens(count=1), past_key_values=cache)


def test_models_that_cannot_be_watched() -> None:
    """Not those of another calibrator, and none that is not transformers'."""
    model, other = tiny(), nn.Linear(2, 2)
    for layers, heads, why in ((LAYERS, 4, "4 h"), (LAYERS - 1, KV_HEADS, "layer 2 .*2 lay")):
        watched = KVCalibrator(layers, heads).watch(model)
        with torch.no_grad(), watched, pytest.raises(ValueError, match=why):
            model(tokens())
    for call in (KVCalibrator.of, lambda model: KVCalibrator(1, 1).watch(model).__enter__()):
        with pytest.raises(ValueError, match=r"Linear.*observe\(\)"):
            call(other)


def test_a_compiled_model_is_not_observed_by_halves() -> None:
    """It says so at ``scales``; run as it was written, it is observed."""
    model, ids = tiny(), tokens()
    expected = by_hand(model, ids)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"layer 0 .*compiled"):
        seen(compiled, ids)
    with torch.compiler.set_stance("force_eager"):
        found, _ = seen(compiled, ids)
    assert off(found, expected) < NEAR
    torch._dynamo.reset()


# -- FSDP2


def watch_sharded(rank: int, folder: Path) -> None:
    """Each rank has a batch of its own; the scales are those of one process that has them all."""
    batches = [(tokens(r), padded(r == 0)) for r in range(WORLD)]
    whole, model = tiny(), sharded(tiny())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for percentile in (None, 99.0):
        alone = KVCalibrator.of(whole, percentile=percentile)
        with torch.no_grad(), alone.watch(whole):
            for ids, mask in batches:
                whole(ids, attention_mask=mask)
        # scales() of one process, in which there is no group of several
        expected = alone._measure(alone._statistics) * 2 / 448  # type: ignore[arg-type]
        expected = expected.log2().ceil().exp2()

        calibrator = KVCalibrator.of(model, percentile=percentile)
        ids, mask = batches[rank]
        with torch.no_grad(), calibrator.watch(model):
            model(ids, attention_mask=mask)
        others = gathered(calibrator._statistics)
        assert not torch.equal(others[0], others[1])  # the control: no rank has it alone
        scales = calibrator.scales()
        assert torch.equal(scales, expected.float())
        assert all(torch.equal(scales, other) for other in gathered(scales))

    # in BF16, with checkpointing and a backward
    model = tiny().train()
    model.gradient_checkpointing_enable()
    sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    calibrator = KVCalibrator.of(model, percentile=99.0)
    with calibrator.watch(model):
        model(batches[rank][0], use_cache=False).logits.sum().backward()
    assert calibrator._statistics is not None
    assert int(calibrator._statistics[0, 0, 0].sum()) == batches[rank][0].numel() * HEAD_DIM
    calibrator.scales()

    # a rank that is not watched: all hear, none waits
    calibrator = KVCalibrator.of(model)
    with torch.no_grad():
        model(batches[rank][0])
    assert "saw no tokens" in failure(calibrator.scales)[1]


def test_ranks_of_a_sharded_model_merge_what_they_saw(tmp_path: Path) -> None:
    run(watch_sharded, tmp_path)
