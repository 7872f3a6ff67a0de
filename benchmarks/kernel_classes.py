"""What a GPU kernel of a forward pass is for: by its name, and a GEMM by its place in the layer."""

import re
from collections.abc import Sequence

GEMM, NORM, ATTENTION, SILU, QK_NORM = "GEMM", "norm", "attention", "SiLU x up", "QK-norm, RoPE"
ROUTING, EXPERTS = "routing", "experts' GEMM"
OTHER = "other"
CLASSES = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (
            "scheduling",
            r"prepare_varlen|kv_indices|graph_metadata|alloc_(decode|extend)|req_to_token|last_loc"
            r"|(compute|clamp)_position|cumsum|DeviceScan|CUDAFunctorOnSelf_add<(int|long)>|^plan$",
        ),
        (
            ATTENTION,
            r"kernel_mha|xqa|(Prefill|Decode)With|MergeState|flash_?(fwd|attn)|flash::"
            r"|_fwd_(grouped_)?kernel|^decode$|^merge_splits$",
        ),
        (QK_NORM, r"qk_?norm|qk_?rmsnorm|rope|rotary|_some_heads"),
        ("KV scales", r"_scale_heads"),
        ("KV write", r"store_kv|_store_(rows|side)|kv_?cache|kv_buffer|reshape_and_cache"),
        (
            ROUTING,
            r"topk_?gating|moe_?(align|sum|fused_mul_sum|permute|finalize)|count_and_sort"
            r"|_(sort|sum)_rows",
        ),
        (SILU, r"silu|act_and_mul"),
        (NORM, r"rms_?norm|layer_?norm|_norm_rows"),
        (EXPERTS, r"fused_moe_kernel|grouped_gemm|m_grouped"),
        ("quantize", r"group_quant|scale_1x128|quantize"),
        (GEMM, r"gemm|nvjet|xmma|split_?k|cutlass|fp8_matmul|_matmul|scaled_mm"),
        ("embedding", r"vectorized_gather|index_?select|embedding"),
        (
            "sampling, logprobs",
            r"distribution_|softmax|sampl|log_?prob|arg_?max|log_kernel|div_(true_)?kernel|gather"
            r"|exponential|TopK|TopP|RadixSort|_reduce_chunk|_draw_row|_assert_async",
        ),
        ("copies", r"memcpy|memset|copy|CatArray|FillFunctor|index"),
    )
)
"""The first that matches; what none matches is ``OTHER``."""

ROLES = {"qkv": "o", "o": "gate_up", "gate_up": "down", "down": "qkv"}
"""The linear that comes after each."""
_NEXT = {("qkv", ATTENTION), ("o", NORM), ("gate_up", SILU), ("down", NORM)}
"""The kernels between one linear and the next."""


def class_of(name: str) -> str:
    """The class of a kernel or of a copy, by its name alone."""
    return next((found for found, pattern in CLASSES if pattern.search(name)), OTHER)


def classes(names: Sequence[str]) -> list[str]:
    """The class of each kernel of whole forward passes, in the order of their start.

    GEMM's names tell no layer, and one linear may be several kernels. So a GEMM is ``GEMM qkv`` up
    to attention, ``GEMM o`` up to the norm, ``GEMM gate_up`` up to SiLU, and ``GEMM down`` up to
    the next norm; one with a norm before it and no attention behind it is ``GEMM lm_head``. Plain
    norms between qkv and attention are QK-norms. Behind routing a GEMM is the experts': DeepGEMM's
    grouped kernel has the name of its dense one.
    """
    found = [class_of(name) for name in names]
    role = "qkv"
    waiting: list[int] = []  # GEMMs of qkv, or of lm_head
    norms: list[int] = []  # behind them
    routed = False  # in this layer
    for index, kind in enumerate(found):
        if kind == GEMM and role == "qkv":
            if norms:  # the norm of the next pass: the GEMMs before it were the last of theirs
                _name(found, waiting, f"{GEMM} lm_head")
                waiting, norms = [], []
            waiting.append(index)
        elif kind in (GEMM, EXPERTS):
            found[index] = f"{EXPERTS if routed else kind} {role}"
        elif kind == NORM and role == "qkv" and waiting:
            norms.append(index)
        if (role, kind) in _NEXT:
            if role == "qkv":
                _name(found, waiting, f"{GEMM} qkv")
                _name(found, norms, QK_NORM)
                waiting, norms = [], []
            routed = routed and role != "down"
            role = ROLES[role]
        routed = routed or kind == ROUTING
    _name(found, waiting, f"{GEMM} lm_head")
    return found


def _name(found: list[str], indices: Sequence[int], kind: str) -> None:
    for index in indices:
        found[index] = kind
