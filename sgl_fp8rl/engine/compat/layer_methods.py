"""SGLang's methods that compute in layers, which ours are built on, and what is used of them."""

_QUANTIZATION = "sglang.srt.layers.quantization"

SYMBOLS = {
    "Fp8LinearMethod": f"{_QUANTIZATION}.fp8:Fp8LinearMethod",
    "Fp8MoEMethod": f"{_QUANTIZATION}.fp8:Fp8MoEMethod",
    "W8A8Fp8LinearMethod": f"{_QUANTIZATION}.w8a8_fp8:W8A8Fp8LinearMethod",
    "W8A8FP8MoEMethod": f"{_QUANTIZATION}.w8a8_fp8:W8A8FP8MoEMethod",
    "W8A8Int8LinearMethod": f"{_QUANTIZATION}.w8a8_int8:W8A8Int8LinearMethod",
    "W8A8Int8MoEMethod": f"{_QUANTIZATION}.w8a8_int8:W8A8Int8MoEMethod",
    "UnquantizedLinearMethod": f"{_QUANTIZATION}.unquant:UnquantizedLinearMethod",
    "UnquantizedFusedMoEMethod": f"{_QUANTIZATION}.unquant:UnquantizedFusedMoEMethod",
}
"""As in ``symbols.py``."""
ATTRIBUTES: dict[str, str] = {
    f"{_QUANTIZATION}.fp8.Fp8LinearMethod": (
        "process_weights_after_loading w8a8_block_fp8_linear weight_scale_inv"
    ),
    f"{_QUANTIZATION}.fp8.Fp8MoEMethod": (
        "process_weights_after_loading runner w13_weight w13_weight_bias w13_weight_scale_inv "
        "w2_weight w2_weight_scale_inv"
    ),
    **{
        f"{_QUANTIZATION}.{linear}": "apply create_weights weight weight_scale"
        for linear in ("w8a8_fp8.W8A8Fp8LinearMethod", "w8a8_int8.W8A8Int8LinearMethod")
    },
    **{
        f"{_QUANTIZATION}.{experts}": (
            "apply create_weights w13_weight w13_weight_scale w2_weight w2_weight_scale"
        )
        for experts in ("w8a8_fp8.W8A8FP8MoEMethod", "w8a8_int8.W8A8Int8MoEMethod")
    },
    f"{_QUANTIZATION}.unquant.UnquantizedLinearMethod": "create_weights",
}
"""As in ``attributes.py``."""
