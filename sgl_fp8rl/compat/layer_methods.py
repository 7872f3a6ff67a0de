"""SGLang's methods that compute in layers, which ours are built on, and what is used of them."""

_QUANTIZATION = "sglang.srt.layers.quantization"

SYMBOLS = {
    "Fp8LinearMethod": f"{_QUANTIZATION}.fp8:Fp8LinearMethod",
    "Fp8MoEMethod": f"{_QUANTIZATION}.fp8:Fp8MoEMethod",
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
    f"{_QUANTIZATION}.unquant.UnquantizedLinearMethod": "create_weights",
}
"""As in ``attributes.py``."""
