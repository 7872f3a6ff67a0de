"""SGLang's arguments of an fp8rl engine: what it is told, and what is refused once resolved."""

from collections.abc import Mapping
from typing import Any

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention import backends
from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.protocol import nixl_memory
from sgl_fp8rl.protocol.kv_schema import E4M3, INT8
from sgl_fp8rl.receiver.kv.scales import read_file

BLACKWELL = 10
"""The major number of its compute capability in data centres."""
GEMM_BACKENDS = ("fp8_gemm_runner_backend", "moe_runner_backend")
REFUSED: Mapping[str, Mapping[str, object]] = {
    "updates reach one tokenizer worker, one scheduler and its ranks on one host": {
        "tokenizer_worker_num": 1,
        "dp_size": 1,
        "attn_dp_size": 1,
        "enable_dp_attention": False,
        "pp_size": 1,
        "nnodes": 1,
    },
    "updates reach no other server that holds a part of the model or of a request": {
        "disaggregation_mode": "null",
        "encoder_only": False,
        "language_only": False,
        "encoder_urls": None,
    },
    "updates do not bring the weights of drafts and adapters": {
        "speculative_algorithm": None,
        "enable_lora": False,
        "lora_paths": None,
    },
    "its weights would be moved, shared or converted, and updates write them in place": {
        "enable_eplb": False,
        "elastic_ep_backend": None,
        "dwdp_size": 1,
        "weight_cache_mode": "off",
        "startup_weight_load_mode": "serial",
        "cpu_offload_gb": 0,
        "offload_group_size": -1,
        "enable_paged_experts": False,
        "kt_weight_path": None,
        "torchao_config": None,
        "dcp_replicate_q_proj": False,
    },
    "its KV cache would outlive the flush of an update": {
        "hicache_storage_backend": None,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_unified_cache_external_linker": False,
        "radix_cache_backend": None,
    },
    "an update could begin between two layers of a prefill": {"enable_pdmux": False},
    "this way to serve has no control route": {"smg_grpc_mode": False, "grpc_mode": False},
}
"""Why, and each field with the value that is not refused: SGLang's default, or an empty one."""


def before_resolution(given: Mapping[str, Any], options: Fp8RLServerArgs) -> dict[str, Any]:
    """What SGLang is told besides what the user gave an engine of ours.

    These alone are decided before SGLang resolves its arguments, whose defaults would not serve.
    All else is decided on what it resolved (``compat/settings.py``).

    Raises:
        ValueError: the user's choice cannot apply KV scales here.
    """
    told: dict[str, Any] = {}
    if given.get("load_format") == "dummy":
        told["skip_server_warmup"] = True  # quarantined: its warm-up request would fail
    capability = backends.capability()
    kv_cache_dtype = backends.dtype_of(options.kv_cache, given.get("kv_cache_dtype"))
    if backends.check_dtype(kv_cache_dtype):
        told["kv_cache_dtype"] = kv_cache_dtype
        told |= backends.choose(given, capability, options.kv_cache or E4M3)
    if capability is not None and capability[0] == BLACKWELL:
        # DeepGEMM would requantize weights there, to scales that are powers of two
        unset = [name for name in GEMM_BACKENDS if given.get(name) in (None, "auto")]
        told |= dict.fromkeys(unset, "triton")
    return told


def check_server_args(server_args: Any, options: Fp8RLServerArgs) -> None:
    """Check the arguments of an engine, before its model is loaded.

    The scheduler of each rank does, and the main process before it starts them.

    Raises:
        ValueError: updates cannot reach all of it, its KV cache cannot be scaled, its control
            route would need two keys in one header, NIXL is to be used and not installed, or a
            grammar's masks cannot be applied here.
    """
    if options.network == "nixl":
        nixl_memory.check_usable()
    settings = resolved(server_args)
    refuse_layout(settings)
    refuse_rust_server()
    refuse_kv_cache(settings, options)
    refuse_second_key(settings, options.key)
    refuse_grammar(settings.grammar_backend)


def refuse_layout(settings: Any) -> None:
    """Refuse configurations that updates cannot reach, before anything starts.

    Raises:
        ValueError: a field of ``REFUSED`` is set. A field that this SGLang lacks is not.
    """
    for why, fields in REFUSED.items():
        for field, unset in fields.items():
            value = getattr(settings, field, unset)
            if (value or unset) != unset:
                raise ValueError(
                    f"quantization fp8rl cannot update an engine with --{field.replace('_', '-')} "
                    f"{value} yet: {why}; start it without"
                )


def refuse_rust_server() -> None:
    """Refuse SGLang's server in Rust, which has no control route.

    Raises:
        ValueError: the variable that starts it is set.
    """
    if compat.RUST_SERVER.get():
        raise ValueError(
            "quantization fp8rl cannot update an engine under SGLANG_RUST_SERVER yet: that server "
            "has no control route; unset the variable"
        )


def refuse_kv_cache(settings: Any, options: Fp8RLServerArgs) -> None:
    """Refuse a KV cache that cannot be scaled, and scales that cannot be read.

    Raises:
        ValueError: the arguments are refused.
    """
    kv_format = options.kv_cache or E4M3
    if not backends.check_dtype(settings.kv_cache_dtype):
        if options.kv_cache is not None:
            raise ValueError(
                f"--fp8rl-kv-cache {options.kv_cache} needs --kv-cache-dtype {backends.FP8_KV} "
                f"where a framework makes SGLang's arguments; add it"
            )
        return
    backends.check_resolved(settings, kv_format)
    if kv_format == INT8:
        refuse_for_int8(settings, options)
    elif options.kv_scales is not None:
        read_file(options.kv_scales)


def refuse_for_int8(settings: Any, options: Fp8RLServerArgs) -> None:
    """Refuse what has no meaning for an INT8 KV cache, or would part codes and their scales.

    Raises:
        ValueError: the arguments are refused.
    """
    for name in ("kv_scales", "kv_scheme"):
        if getattr(options, name) != getattr(Fp8RLServerArgs(), name):
            raise ValueError(
                f"--fp8rl-{name.replace('_', '-')} is of scales of layers, which "
                f"--fp8rl-kv-cache int8 has none of; drop one"
            )
    if settings.enable_hierarchical_cache:
        raise ValueError(
            "--enable-hierarchical-cache moves codes of the KV cache and not the scales of "
            "--fp8rl-kv-cache int8; drop one"
        )


def refuse_second_key(settings: Any, key: str | None) -> None:
    """Refuse a key of ours beside another of SGLang's: a request has one ``Authorization``.

    Raises:
        ValueError: they differ.
    """
    name = "admin_api_key" if settings.admin_api_key else "api_key"
    if key is not None and getattr(settings, name) not in (None, "", key):
        raise ValueError(
            f"FP8RL_KEY is not the --{name.replace('_', '-')}, which SGLang requires of the same "
            f"requests; set both to the same key"
        )


def refuse_grammar(backend: str | None) -> None:
    """Refuse a grammar backend whose masks cannot be applied to the logits of the CPU platform.

    Raises:
        ValueError: it is xgrammar of SGLang 0.5.17.
    """
    if backend != "xgrammar":
        return
    from sgl_fp8rl.engine.cpu.cpu_platform import is_active  # resolves SGLang's platform

    if is_active() and not compat.xgrammar_masks_on_cpu():
        raise ValueError(
            f"--grammar-backend xgrammar of SGLang {compat.sglang_version()} masks logits on GPUs "
            f"alone, and a JSON schema or a regex would end this engine; use llguidance, the "
            f"default on a CPU"
        )
