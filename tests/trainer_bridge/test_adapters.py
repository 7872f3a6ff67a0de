"""What an update is given of a model with adapters of PEFT, held against the trainer's logits."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.manifest import ManifestError
from tests.trainer_bridge import moe_models, ranks
from tests.trainer_bridge.test_fsdp import WORLD, failure, plain_engine, sharded
from tests.trainer_bridge.test_hf_names import streamed
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.parameters import named_tensors
from trainer_bridge.updates.update import update

ROUNDING = 1e-3
"""Of logits up to 10, and up to 200 where an embedding has an adapter: at most 5e-5 of them."""
ADAPTED = 5e-3
"""What an adapter changes in logits, at least: AdaLoRA's 5.6e-3, others from 0.03 on."""
BF16 = 2.0**-7
TOKENS = torch.tensor([[1, 2, 3, 7, 9]])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@cache
def plain(family: str) -> Any:
    if family == "tied":
        return moe_models.tiny("qwen3", tie_word_embeddings=True)
    return moe_models.tiny(family, **({"head_dim": None} if family == "llama" else {}))


def trained(config: Any, family: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    """A model whose adapters do something, each of them."""
    model = copy.deepcopy(plain(family)).to(dtype)
    torch.manual_seed(0)
    return moved(get_peft_model(model, copy.deepcopy(config)))


def moved(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]


def state_of(model: nn.Module) -> dict[str, tuple[int, int, torch.Tensor]]:
    """All tensors, which object each is, and how often torch knows it was written to."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (id(t), t._version, t.detach().clone()) for name, t in named}


def is_same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        one[name][:2] == other[name][:2] and torch.equal(one[name][2], other[name][2])
        for name in one
    )


def check_sent(model: Any, family: str = "qwen3") -> None:
    """What is sent makes of a model without adapters the one that is trained, and nothing else
    happens to that."""
    wanted = logits_of(model)
    before = state_of(model)  # a forward of adapters of parameters registers those anew
    engine: Any = copy.deepcopy(plain(family))
    assert (logits_of(engine) - wanted).abs().max() > ADAPTED, "the adapter does nothing"
    sent = dict(named_tensors(model))
    assert sent.keys() == {name for name, _ in named_tensors(engine)}
    engine.load_state_dict(sent, strict=False)
    engine.tie_weights()
    assert (logits_of(engine) - wanted).abs().max() < ROUNDING
    assert is_same(state_of(model), before)
    assert torch.equal(logits_of(model), wanted)
    assert hf_names.model_type(model) == plain(family).config.model_type


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    )


def other(kind: str, init: str | None = "init_weights", **options: Any) -> Any:
    """A config of another kind than LoRA, on ``o_proj``."""
    begins = {} if init is None else {init: False}
    return getattr(peft, f"{kind}Config")(**{"target_modules": ["o_proj"], **begins, **options})


OF_RANK = ("HRA", "LoHa", "LoKr", "Miss", "RandLora", "Shira", "Vera")
KINDS = {
    "LoRA": lora(),
    "LoRA of all linears": lora(target_modules="all-linear"),
    "LoRA of one layer": lora(layers_to_transform=[1]),
    "LoRA, biases trained": lora(bias="all"),
    "LoRA, norm saved": lora(modules_to_save=["norm"]),
    "LoRA, some tokens": lora(trainable_token_indices=[1, 3]),
    "LoRA of different ranks": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 9}),
    "DoRA": lora(use_dora=True),
    "rsLoRA": lora(use_rslora=True),
    "PiSSA": lora(init_lora_weights="pissa"),
    "OLoRA": lora(init_lora_weights="olora"),
    "AdaLoRA": other("AdaLora", None, total_step=10, init_r=4),
    "C3A": other("C3A", block_size=8),
    **{kind: other(kind, r=4) for kind in OF_RANK},
    **{kind: other(kind, n_frequency=20) for kind in ("FourierFT", "WaveFT")},
    "IA3": other("IA3", "init_ia3_weights", feedforward_modules=[]),
    "norms": other("LNTuning", None, target_modules=["input_layernorm"]),
    "OFT": other("OFT", oft_block_size=4),
    "RoAd": other("Road", group_size=4),
    "tokens": other("TrainableTokens", None, target_modules=["embed_tokens"], token_indices=[1]),
    "VB-LoRA": other("VBLoRA", None, vector_length=4, num_vectors=8, topk=2, r=2),
}
"""Kinds that do not touch the head alone, or the embedding. BOFT would build a CUDA extension."""
BOTH = ["embed_tokens", "lm_head"]
PARTS = {"embedding": BOTH[:1], "head": BOTH[1:], "both": BOTH}
ENDS = {
    **{f"{name} saved": lora(modules_to_save=part) for name, part in PARTS.items()},
    **{f"LoRA of the {name}": lora(target_modules=part) for name, part in PARTS.items()},
    "DoRA of the embedding": lora(target_modules=BOTH[:1], use_dora=True),
    "some tokens of both": lora(trainable_token_indices={"embed_tokens": [1], "lm_head": [2]}),
    "nothing yet": LoraConfig(target_modules=BOTH[:1]),
}
"""Kinds that make an embedding and a head that are tied two."""
TIED = {
    "embedding saved": lora(modules_to_save=BOTH[:1], ensure_weight_tying=True),
    "LoRA of the embedding": lora(target_modules=BOTH[:1], ensure_weight_tying=True),
    "some tokens": lora(trainable_token_indices=[1, 3], ensure_weight_tying=True),
}
OF_EXPERTS = {
    "attention": lora(),
    "all linears": lora(target_modules="all-linear"),
    "both parameters of experts": lora(target_modules=[], target_parameters=EXPERTS),
    "one, and attention": lora(target_parameters=EXPERTS[:1]),
    "experts saved": lora(modules_to_save=["experts"]),
    "router": lora(target_modules=[], target_parameters=["mlp.gate.weight"]),
    "router saved": lora(modules_to_save=["gate"]),
}


SENT = {
    **{(kind, family): KINDS[kind] for kind in KINDS for family in ("qwen3", "tied")},
    **{(kind, "qwen3"): ENDS[kind] for kind in ENDS if kind != "nothing yet"},
    **{(kind, "tied"): TIED[kind] for kind in TIED},
}
"""Also of a head and an embedding that may differ, and adapters that are tied too."""


@pytest.mark.parametrize(("kind", "family"), SENT)
def test_what_is_sent_has_the_trainers_logits(kind: str, family: str) -> None:
    check_sent(trained(SENT[kind, family], family), family)


@pytest.mark.parametrize("kind", ENDS)
def test_adapters_that_part_what_is_tied_are_refused(kind: str) -> None:
    """Also before they have learned anything: they would be refused after the first step."""
    model = trained(ENDS[kind], "tied")
    if kind == "nothing yet":
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(plain("tied")), ENDS[kind])
        assert torch.equal(logits_of(model), logits_of(plain("tied")))
    before = state_of(model)
    with pytest.raises(ManifestError, match=r"model\.embed_tokens\.weight and lm_head\.weight are"):
        named_tensors(model)
    assert is_same(state_of(model), before)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_adapters_of_experts(kind: str, family: str) -> None:
    model = trained(OF_EXPERTS[kind], family)
    check_sent(model, family)
    assert streamed(model, torch.float32).keys() == streamed(plain(family), torch.float32).keys()


# -- which adapters a forward computes with


def two(active: list[str], save: list[str] | None = None) -> Any:
    model = trained(lora(modules_to_save=save))
    model.add_adapter("b", lora(target_modules=["o_proj"], modules_to_save=save))
    model.base_model.set_adapter(["b"])
    moved(model)
    model.base_model.set_adapter(active)
    return model


def merged_before() -> Any:
    model = trained(lora())
    model.merge_adapter()
    return model


def partly_disabled() -> Any:
    model = trained(lora())
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.enable_adapters(False)
    return model


def around_another() -> Any:
    inner = trained(lora())
    return moved(get_peft_model(inner, other("LoHa", target_modules=["q_proj", "o_proj"], r=4)))


def injected() -> Any:
    """By transformers, which wraps nothing around the model."""
    model = copy.deepcopy(plain("qwen3"))
    model.add_adapter(lora())
    return moved(model)


STATES: dict[str, Callable[[], Any]] = {
    "one of two": partial(two, ["default"]),
    "the other": partial(two, ["b"]),
    "both": partial(two, ["default", "b"]),
    "one of two that save": partial(two, ["default"], ["lm_head"]),
    "the other that saves": partial(two, ["b"], ["lm_head"]),
    "merged before": merged_before,
    "partly disabled": partly_disabled,
    "of another kind around": around_another,
    "in the layers alone": injected,
}


@pytest.mark.parametrize("state", STATES)
def test_what_is_sent_is_what_a_forward_computes_with(state: str) -> None:
    check_sent(STATES[state]())


@pytest.mark.parametrize("save", [None, ["lm_head", "norm"]])
def test_disabled_adapters_are_left_out(save: list[str] | None) -> None:
    model = trained(lora(modules_to_save=save))
    before = state_of(model)
    with model.disable_adapter():
        sent = dict(named_tensors(model))
    wanted = dict(named_tensors(plain("qwen3")))
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[name], wanted[name]) for name in wanted)
    assert is_same(state_of(model), before)
    check_sent(model)  # the control: they are not, once they are enabled again


def test_adapters_that_were_merged_and_then_disabled_are_taken_out() -> None:
    """A forward would take them out of the trainer's own weights; an update does not."""
    model = merged_before()
    model.base_model.disable_adapter_layers()
    before = state_of(model)
    sent = dict(named_tensors(model))
    assert is_same(state_of(model), before)
    for name, tensor in named_tensors(plain("qwen3")):
        assert torch.allclose(sent[name], tensor, atol=1e-6), name
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(model.get_base_model().get_submodule(q[:-7]).weight, sent[q])


# -- the trainer's own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_keeps_its_bits(dtype: torch.dtype) -> None:
    model = trained(lora(target_modules="all-linear"), dtype=dtype)
    before = state_of(model)
    sent = dict(named_tensors(model))
    assert is_same(state_of(model), before)
    assert {tensor.dtype for tensor in sent.values()} == {dtype}
    unmerged = copy.deepcopy(model)  # the control
    unmerged.merge_adapter()
    unmerged.unmerge_adapter()
    assert any(not torch.equal(t, before[name][2]) for name, t in unmerged.named_parameters())


def test_an_interrupt_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = trained(lora(), dtype=torch.bfloat16), []
    before, wanted = state_of(model), logits_of(model)
    merge = peft.tuners.lora.Linear.merge

    def interrupted(*args: Any, **options: Any) -> None:
        merge(*args, **options)
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(peft.tuners.lora.Linear, "merge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        named_tensors(model)
    assert is_same(state_of(model), before)
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert torch.equal(logits_of(model), wanted)


def test_what_has_no_adapter_is_the_trainers_own_memory() -> None:
    model = trained(lora())
    own = {parameter.data_ptr() for parameter in model.parameters()}
    copies = {name for name, tensor in named_tensors(model) if tensor.data_ptr() not in own}
    attention = {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qv"}
    assert copies == attention


def test_the_copies_are_freed_with_what_is_sent() -> None:
    model = trained(lora())
    gc.collect()
    gc.disable()
    try:
        sent = dict(named_tensors(model))
        copies = [weakref.ref(tensor) for name, tensor in sent.items() if "q_proj" in name]
        assert len(copies) == 2 and all(copies)
        del sent
        assert not any(copy() is not None for copy in copies)
    finally:
        gc.enable()


# -- what cannot be sent


def adaption_prompt() -> Any:
    config = peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")
    return trained(config, "llama")


def x_lora() -> Any:
    with TemporaryDirectory() as folder:
        trained(lora(), "llama").save_pretrained(folder)
        model = copy.deepcopy(plain("llama"))
        model.config.use_cache = False
        adapters = {"0": folder, "1": folder}
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters=adapters
        )
        return get_peft_model(model, config)


def prompts(kind: str, **options: Any) -> Any:
    config = getattr(peft, f"{kind}Config")
    return trained(config(task_type="CAUSAL_LM", num_virtual_tokens=3, **options))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "PROMPT_TUNING": (partial(prompts, "PromptTuning"), "more than weights"),
    "PREFIX_TUNING": (partial(prompts, "PrefixTuning"), "more than weights"),
    "P_TUNING": (partial(prompts, "PromptEncoder", encoder_hidden_size=8), "more than weights"),
    "ADAPTION_PROMPT": (adaption_prompt, "more than weights"),
    "XLORA": (x_lora, "more than weights"),
    **{
        rf"layers\.0\.self_attn\.{layer}_proj": (
            partial(trained, config),
            f"PEFT cannot merge {why}",
        )
        for layer, config, why in (
            ("q", lora(alora_invocation_tokens=[7]), ".* aLoRA does not support merging"),
            ("[q]", lora(lora_bias=True), ".* base layer has no bias"),
            ("o", other("Poly", None, r=4), ""),
        )
    },
}
"""What the error names, and what it says of that."""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused_before_anything_is_sent(kind: str) -> None:
    make, why = REFUSED[kind]
    model = make()
    before, engine = state_of(model), plain_engine(streamed(plain("qwen3"), torch.float32))
    with pytest.raises(ManifestError, match=f"{kind}.*{why}"):
        update(model, engine, version=0)
    assert engine.ops == []
    assert is_same(state_of(model), before)


# -- on several ranks


def merge_shards(rank: int, folder: Path) -> None:
    for family, config in (
        ("qwen3", lora(target_modules="all-linear", modules_to_save=["norm"])),
        ("mixtral", lora()),
    ):
        wanted = streamed(trained(config, family), torch.float32)
        model = trained(config, family)
        sharded(model.get_base_model())
        fully_shard(model)
        before = {name: p.to_local().clone() for name, p in model.named_parameters()}
        logits_of(model)  # leaves the root's parameters whole, which are those of no step
        engine = plain_engine(wanted) if rank == 0 else None
        update(model, engine, version=0)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for name, p in model.named_parameters():
            assert torch.equal(p.to_local(), before[name]), name
        if engine is not None:
            held = engine.ranks[0].model
            for name, tensor in wanted.items():
                # products of shards may round otherwise
                found = held.get_parameter(name).float()
                assert torch.allclose(found, tensor, rtol=BF16, atol=BF16 / 100), name

    model = fully_shard(trained(lora(modules_to_save=["embed_tokens"]), "tied"))
    engine = plain_engine(streamed(plain("tied"), torch.float32)) if rank == 0 else None
    found = failure(lambda: update(model, engine, version=0))
    assert found[0] == ManifestError.__name__ and "are one tensor, tied" in found[1]


@pytest.mark.timeout(ranks.JOIN_S + 30)
def test_sharded_adapters_are_merged_and_shards_keep_their_bits(tmp_path: Path) -> None:
    ranks.run(merge_shards, tmp_path, WORLD, 60)
