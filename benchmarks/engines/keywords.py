"""Keywords of ``sglang.Engine`` that the benchmarks' arms share."""

import json
from typing import Any

Keywords = dict[str, Any]

ENGINE: Keywords = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "log_level": "warning",
    "cuda_graph_backend_prefill": "disabled",
    "chunked_prefill_size": 16384,
    "random_seed": 0,
}
FULL: Keywords = {"mem_fraction_static": 0.88, "cuda_graph_max_bs_decode": 128}
"""Where capacity and speed are measured."""
# SGLang's own kernels may use NVLink multicast, which a shared host may not allow
NCCL_ALONE: Keywords = {
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
"""Of the environment."""

KV8: Keywords = {"kv_cache_dtype": "fp8_e4m3"}
# FA3 prefills and XQA decodes one cache: the fastest that stock SGLang can be told to do on Hopper
STOCK_XQA: Keywords = {
    **KV8,
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "trtllm_mha",
    "page_size": 64,
}
# TensorRT-LLM's FMHA prefills that cache, and XQA decodes it; SGLang 0.5.17 has it not on Hopper
STOCK_TRTLLM: Keywords = {**KV8, "attention_backend": "trtllm_mha", "page_size": 64}
BLOCK_FP8: Keywords = {
    "quantization": "fp8",
    "json_model_override_args": json.dumps(
        {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
            }
        }
    ),
}
OURS: Keywords = {"quantization": "fp8rl", "fp8rl_bucket_bytes": 256 << 20}
# no attention backend is named: the plugin chooses what serves an FP8 KV cache
OURS_KV8: Keywords = {**OURS, **KV8}
OURS_INT8: Keywords = {**OURS, "fp8rl_kv_cache": "int8"}


def is_stock(keywords: Keywords) -> bool:
    """Whether SGLang runs as it is, without our quantization."""
    return keywords.get("quantization") != "fp8rl"


def kv_format(keywords: Keywords) -> str:
    """Of the KV cache, as in ``traffic.KV``."""
    default = "bf16" if keywords.get("kv_cache_dtype", "auto") == "auto" else "e4m3"
    return str(keywords.get("fp8rl_kv_cache", default))


def weight_format(keywords: Keywords) -> str:
    """How the engine holds its linears: "fp8" or "bf16"."""
    return "fp8" if keywords.get("quantization") else "bf16"
