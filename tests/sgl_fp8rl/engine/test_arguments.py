"""Which of SGLang's arguments an fp8rl engine refuses, and that each one of a kind is known."""

import re
import sys
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat, plugin
from sgl_fp8rl.engine.startup import arguments
from tests.sgl_fp8rl.resolving import Start

MODEL = {"model_path": "dummy", "quantization": "fp8rl"}
"""SGLang resolves no argument of a model of that name."""
REFUSED = {field: unset for fields in arguments.REFUSED.values() for field, unset in fields.items()}
OTHER_VALUES = {
    "encoder_urls": ["http://127.0.0.1:1"],
    "speculative_algorithm": "EAGLE",
    "lora_paths": ["mine=/adapter"],
    "elastic_ep_backend": "mooncake",
    "disaggregation_mode": "decode",
    "weight_cache_mode": "client",
    "startup_weight_load_mode": "overlap",
    "kt_weight_path": "/experts",
    "torchao_config": "int8wo",
    "hicache_storage_backend": "file",
    "radix_cache_backend": "flexkv",
}
"""A value for each field that takes neither a switch nor a number."""
ONE_VERSION = {
    "attn_dp_size",
    "enable_paged_experts",
    "enable_unified_cache_external_linker",
    "startup_weight_load_mode",
    "torchao_config",
}
"""Fields that one of the tested versions lacks."""
FOLDED = "enable_dp_attention"
"""A flag that 0.5.23 resolves into ``attn_dp_size``."""

CONCERNED = (
    "weight|offload|kv|cache|disagg|encoder|language|expert|elastic|eplb|linker|lora|quant|parallel"
    "|checkpoint|torchao|pdmux|nnodes|load_format|mm_enable|(^|_)(d?cp|d?dp|dwdp|ep|pp|tp)(_|$)"
)
"""Names that concern weights, KV caches, offloading, parallelism or disaggregation."""
DETAILS = (
    r"_?speculative_\w+|\w*lora\w*|enable_draft_weights_cpu_backup|disaggregation_\w+"
    r"|enable_kv_cache_sharding|encoder_(transfer|bootstrap|register)_\w+|pdmux_config_path"
    r"|enable_adaptive_dispatch_to_encoder|enable_prefix_mm_cache|\w*mm_global_cache\w*|eplb_\w+"
    r"|elastic_ep_\w+|enable_elastic_expert_backup|ep_join_\w+|max_ep_size|pp_\w+|enable_dp_\w+"
    r"|offload_\w+|paged_experts_\w+|kt_\w+|weight_cache_(socket|timeout)|lmcache_config_file"
    r"|flexkv_config_file|unified_cache_external_linker_\w+|enable_linker_mla_dedup"
)
"""Settings of what a refused field starts."""
HARMLESS = {
    "each rank records the routes of its own slices": r"(tp|ep|attn_cp|dcp|moe_dp|moe_dense_tp"
    r"|shared_experts_tp)_size|\w*(prefill_cp|prefill_context_parallel|attn_tp)(_\w+)?|cp_strategy"
    r"|dcp_(?!replicate_q_proj)\w+|enable_cp_tp_group_sharing|enable_tp_lm_head_all_to_all|mm_enable_dp_encoder"
    r"|ep_num_redundant_experts|ep_dispatch_algorithm|init_expert_location"
    r"|(disable|enforce)_shared_experts_fusion|language_model_only",
    "the plugin's loader checks it, or does not read it": r"load_format|quantization|modelopt_\w+"
    r"|quantize_and_serve|rl_quant_profile|custom_weight_loader|weight_loader_(disable_mmap"
    r"|prefetch_checkpoints|prefetch_num_threads|drop_cache_after_load)"
    r"|remote_instance_weight_loader_(seed|send|start_seed)_\w+|remote_instance_weight_loader_backend"
    r"|checkpoint_engine_wait_weights_before_ready",
    "a flush empties this cache": r"(enable_hierarchical|disable_radix|disable_chunked_prefix"
    r"|enable_session_radix|strip_thinking)_cache|hicache_(ratio|size|write_policy|io_backend"
    r"|mem_layout|host_memory_mode|host_memory_fraction|storage_prefetch_\w+"
    r"|storage_backend_extra_config)|\w*mamba\w*|linear_replayssm_cache_len",
    "refuse_kv_cache checks it, or an FP8 KV cache does not read it": r"kv_cache_dtype"
    r"|quantization_param_path|prefill_kv_cache_dequant_dtype|prefill_only_disable_kv_cache"
    r"|enable_page_major_kv_layout|triton_attention_num_kv_splits",
    "no weights and no KV in it": r"weight_version|enable_cache_report|kv_(events|canary)\w*"
    r"|enable_quant_communications|disable_outlines_disk_cache|mm_preprocess_cache_size_mb"
    r"|\w*expert_(distribution|balancedness)_\w+|enable_return_routed_experts",
    "a release of weights quarantines": "enable_weights_cpu_backup",
    "only models that fp8rl refuses or that were not tried": r"(enable_)?dsa_\w+|ple_offload_\w+"
    r"|enable_encoder_swa_bounded_replay",
}


def other_value(field: str) -> Any:
    """A value of ``field`` that is refused."""
    return OTHER_VALUES.get(field, True if REFUSED[field] is False else 2)


def judged(name: str) -> bool:
    """Whether the argument ``name`` is refused, or known to be harmless, or not of our kinds."""
    known = [DETAILS, *HARMLESS.values()]
    return (
        not re.search(CONCERNED, name)
        or name in REFUSED
        or any(re.fullmatch(pattern, name) for pattern in known)
    )


@pytest.mark.guarantee("no-bypass", fault="an argument of SGLang's that is not known")
def test_each_argument_of_a_kind_is_known() -> None:
    """Judge a new one: refuse it in ``arguments.py``, or say above why it is harmless."""
    names = vars(compat.ServerArgs(**MODEL))
    assert [name for name in names if not judged(name)] == []


def test_a_new_argument_is_found() -> None:
    """A pattern that is too wide would hide it."""
    for name in ("enable_weight_paging", "hicache_peer", "kv_linker", "ffn_dp_size", "cpu_offload"):
        assert not judged(name)
    for pattern in HARMLESS.values():
        assert [name for name in REFUSED if re.fullmatch(pattern, name)] == []


@pytest.mark.parametrize("field", REFUSED)
def test_a_layout_that_updates_cannot_reach_is_refused(field: str) -> None:
    """By the flag's name, which must be one of SGLang's; stock engines are undisturbed. Which of
    these SGLang itself takes depends on the others, so that it does not resolve them here."""
    value = other_value(field)
    with pytest.raises(ValueError, match=re.escape(f" {value} yet: ")) as refusal:
        arguments.refuse_layout(SimpleNamespace(**{field: value}))
    if not hasattr(compat.ServerArgs(**MODEL), field):
        assert field in ONE_VERSION
        return
    if field != FOLDED:
        with pytest.raises(ValueError, match=re.escape(str(refusal.value))):
            plugin.parse_engine_kwargs(**MODEL, **{field: value})
    parser = ArgumentParser()
    compat.ServerArgs.add_cli_args(parser)
    (flag,) = {word for word in str(refusal.value).split() if word.startswith("--")}
    assert {action.dest for action in parser._actions if flag in action.option_strings} == {field}
    stock = plugin.parse_engine_kwargs(**MODEL | {"quantization": "fp8"}, **{field: value})
    assert getattr(stock, field) == value


@pytest.mark.parametrize("field", [FOLDED, "attn_dp_size"])
def test_dp_attention_is_refused_by_either_flag(start: Start, field: str) -> None:
    if not hasattr(start.made(), field):
        return
    value = {FOLDED: True, "dp_size": 2} if field == FOLDED else {field: 2}
    with pytest.raises(ValueError, match=r"cannot update .* --(attn-)?dp-size 2"):
        plugin.parse_engine_kwargs(**MODEL | {"model_path": start.model}, tp_size=2, **value)


def test_no_default_is_refused() -> None:
    arguments.refuse_layout(compat.ServerArgs(**MODEL))
    arguments.refuse_layout(SimpleNamespace())  # no version has all of them


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        ({}, None),
        ({"api_key": "ours"}, None),
        ({"api_key": "other", "admin_api_key": "ours"}, None),
        ({"api_key": "other"}, "--api-key"),
        ({"api_key": "ours", "admin_api_key": "other"}, "--admin-api-key"),
    ],
)
def test_one_header_must_carry_both_keys(keys: dict[str, str], flag: str | None) -> None:
    server_args = compat.ServerArgs(**MODEL, **keys)
    arguments.refuse_second_key(server_args, None)
    if flag is None:
        arguments.refuse_second_key(server_args, "ours")
        return
    with pytest.raises(ValueError, match=flag) as refusal:
        arguments.check_server_args(server_args, Fp8RLServerArgs(key="ours"))
    assert not {"other", "ours"} & set(str(refusal.value).split())


def test_nixl_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ValueError, match="pip install"):
        arguments.check_server_args(SimpleNamespace(), Fp8RLServerArgs(network="nixl"))


def test_xgrammar_masks_logits_of_a_cpu_or_is_refused() -> None:
    """SGLang's own default would be one that does not."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    for backend in (None, "none", "llguidance", "outlines"):
        arguments.refuse_grammar(backend)
    logits, allowed = torch.zeros(1, 32), torch.full((1, 1), 1, dtype=torch.int32)
    if compat.xgrammar_masks_on_cpu():
        arguments.refuse_grammar("xgrammar")
        XGrammarGrammar.apply_vocab_mask(None, logits, allowed)
        assert logits.isfinite().tolist() == [[True] + [False] * 31]
        return
    with pytest.raises(RuntimeError, match="cpu"):
        XGrammarGrammar.apply_vocab_mask(None, logits, allowed)
    server_args = compat.ServerArgs(**MODEL, grammar_backend="xgrammar")
    with pytest.raises(ValueError, match="use llguidance"):
        arguments.check_server_args(server_args, Fp8RLServerArgs())


def test_the_cpu_platform_chooses_a_grammar_backend() -> None:
    chosen = SimpleNamespace(**dict.fromkeys(("device", "attention_backend", "sampling_backend")))
    for given in (None, "outlines"):
        chosen.grammar_backend = given
        compat.current_platform.apply_server_args_defaults(chosen)
        assert chosen.grammar_backend == (given or "llguidance")
