"""A model in each wrapper, and in each wrapper around each: the same one to all that takes it."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from sgl_fp8rl.protocol.manifest import ManifestError
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import moe_models, ranks
from tests.trainer_bridge.test_fsdp import WORLD, failure, gathered, plain_engine
from tests.trainer_bridge.test_hf_names import saved, streamed
from trainer_bridge.fp8.fp8_forward import convert_layers
from trainer_bridge.kv.kv_calibrator import KVCalibrator
from trainer_bridge.router_replay import record_routing
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.parameters import named_tensors
from trainer_bridge.updates.update import update

TIMEOUT_S = 60
"""A rank that is left waiting fails after this."""
JOIN_S = 540.0
"""Seconds that both ranks may take over all pairs, which are 49."""


def adapted(model: nn.Module) -> Any:
    """With LoRA on attention and, where it has any, on both parameters of its experts."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    has_experts = any(".experts." in name for name, _ in model.named_modules())
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=experts if has_experts else None,
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    return get_peft_model(model, config)  # type: ignore[arg-type]


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**moe_models.TINY, "num_hidden_layers": 1, "rope_parameters": rope}
    tower = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = transformers.AutoConfig.for_model(
        "qwen2_vl", text_config=text, vision_config=tower, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": torch.compile,
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
    "checkpoint": checkpoint_wrapper,
    "data parallel": nn.DataParallel,
    "averaged": AveragedModel,
    "peft": adapted,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "mixtral": partial(moe_models.tiny, "mixtral"),
    "qwen2_vl": qwen2_vl,
    "qwen3_moe": moe_models.tiny,
}
"""Those whose checkpoints call experts and towers as no other does, and one as most do."""
NOT_MADE = {
    ("ddp", "fsdp2"): RuntimeError,
    ("fsdp2", "fsdp2"): AssertionError,
    ("averaged", "fsdp2"): AssertionError,
    ("peft", "peft"): ValueError,
}
"""What torch and PEFT themselves refuse."""
REFUSED = {
    ("compile", "compile"): "the weights are a function",
    ("peft", "fsdp2"): "add adapters first and call fully_shard",
}


def wrap_twice(rank: int, folder: Path) -> None:
    """Each pair updates an engine, with the families in turn, so that each wrapper has all."""
    plain = {family: make() for family, make in FAMILIES.items()}
    wanted = {  # newer transformers save on rank 0 alone
        (family, is_adapted): gathered(
            saved(
                adapted(copy.deepcopy(model)).merge_and_unload() if is_adapted else model,
                folder / f"{family}-{is_adapted}-{rank}",
            )
        )[0]
        for family, model in plain.items()
        for is_adapted in (False, True)
    }
    names = list(WRAPPERS)
    for outer, inner in product(names, names):
        pair = outer, inner
        families = list(FAMILIES)
        family = families[(names.index(outer) + names.index(inner)) % len(families)]
        if pair == ("peft", "peft"):
            family = "mixtral"  # two LoRAs of one linear are possible
        bare = copy.deepcopy(plain[family])
        if pair in NOT_MADE:
            with pytest.raises(NOT_MADE[pair]):
                WRAPPERS[outer](WRAPPERS[inner](bare))
            gathered(pair)
            continue
        model = WRAPPERS[outer](WRAPPERS[inner](bare))
        expected = wanted[family, "peft" in pair]
        engine = plain_engine(expected) if rank == 0 else None
        group = None if {"ddp", "fsdp2"} & {*pair} else torch.distributed.group.WORLD
        if pair in REFUSED:
            found = failure(lambda m=model, e=engine, g=group: update(m, e, version=0, group=g))  # type: ignore[misc]
            assert (found[0], REFUSED[pair] in found[1]) == ("ManifestError", True), (pair, found)
            assert engine is None or engine.ops == [], pair
            continue
        result = gathered(update(model, engine, version=0, group=group))
        assert {each.tensors for each in result} == {len(expected)}, pair
        assert hf_names.model_type(model) == family, pair
        if engine is not None:
            held = engine.ranks[0].model
            for name, tensor in expected.items():
                assert torch.equal(held.get_parameter(name), tensor.to(toy.BF16)), (pair, name)


@pytest.mark.timeout(JOIN_S + 30)
def test_each_wrapper_around_each_updates_an_engine(tmp_path: Path) -> None:
    ranks.run(wrap_twice, tmp_path, WORLD, TIMEOUT_S, JOIN_S)


def go_through(rank: int, folder: Path) -> None:
    """What watches a forward sees that of the plain model, through FSDP2's and DDP's hooks."""
    tokens = moe_models.random_tokens(10, seed=0).view(2, 5)
    mask = torch.ones_like(tokens)

    def seen(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        calibrator = KVCalibrator.of(model)
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            calibrator.watch(model),
            record_routing(model, attention_mask=mask) as record,
        ):
            model(input_ids=tokens, attention_mask=mask, use_cache=False)
        return calibrator.scales(), record.experts

    for outer, inner in product(WRAPPERS, WRAPPERS):
        pair = outer, inner
        if pair in NOT_MADE or pair in REFUSED:
            continue
        plain = adapted(moe_models.tiny()) if "peft" in pair else moe_models.tiny()
        model = WRAPPERS[outer](WRAPPERS[inner](moe_models.tiny()))
        (scales, experts), (own_scales, own_experts) = seen(model), seen(plain)
        assert torch.equal(scales, own_scales), pair
        assert all(map(torch.equal, experts, own_experts)), pair


@pytest.mark.timeout(JOIN_S + 30)
def test_what_watches_a_forward_sees_it_through_wrappers(tmp_path: Path) -> None:
    ranks.run(go_through, tmp_path, WORLD, TIMEOUT_S, JOIN_S)


def test_parts_may_be_wrapped_too() -> None:
    """As FSDP2's users wrap layers, and torch.compile's regions; twice, and the whole as well."""
    plain, model = moe_models.tiny("mixtral"), moe_models.tiny("mixtral")
    for index, layer in enumerate(model.model.layers):
        layer.mlp = torch.compile(layer.mlp)
        model.model.layers[index] = checkpoint_wrapper(torch.compile(checkpoint_wrapper(layer)))
    wanted = streamed(plain, torch.float32)
    for whole in (model, nn.DataParallel(torch.compile(nn.DataParallel(model)))):
        found = streamed(whole, torch.float32)
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_wrapper_of_a_router_is_no_second_router() -> None:
    tokens = moe_models.random_tokens(5, seed=0).view(1, 5)
    plain, model = moe_models.tiny(), moe_models.tiny()
    for layer in model.model.layers:
        layer.mlp.gate = checkpoint_wrapper(layer.mlp.gate)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
    for each in (model, get_peft_model(moe_models.tiny(), config)):
        found = []
        for routed in (each, plain):
            with torch.no_grad(), record_routing(routed, sequence_ids=tokens * 0) as record:
                routed(tokens)
            found.append(record.experts)
        assert all(map(torch.equal, *found))


def test_codes_are_of_the_layers_inside() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    plain = moe_models.tiny("mixtral", torch.bfloat16, **sizes)
    names = {name for name in streamed(plain, torch.bfloat16) if ".experts." in name}
    model = nn.DataParallel(AveragedModel(moe_models.tiny("mixtral", torch.bfloat16, **sizes)))
    converted = convert_layers(model, names, torch.bfloat16)
    assert converted.names == tuple(sorted(names))
    wanted = named_tensors(convert_layers(plain, names, torch.bfloat16).model)
    assert [name for name, _ in named_tensors(model)] == [name for name, _ in wanted]
    with pytest.raises(ValueError, match="adapters of PEFT"):
        convert_layers(adapted(moe_models.tiny("mixtral")), names, torch.bfloat16)


def test_what_is_no_wrapper_keeps_its_names() -> None:
    """A module of the model's own that is called as wrappers call theirs."""
    model = nn.ModuleDict({"a": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    assert hf_names.unwrapped(model) is model
    assert [name for name, _ in named_tensors(model)] == ["a.module.weight", "a.module.bias"]
    both = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert [name for name, _ in named_tensors(both)] == [n for n, _ in both.named_parameters()]


def test_fsdp1_is_refused_inside_of_others() -> None:
    flattened = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(flattened)
    for model in (nn.DataParallel(flattened), torch.compile(nn.DataParallel(flattened))):
        with pytest.raises(ManifestError, match="FSDP1"):
            named_tensors(model)
