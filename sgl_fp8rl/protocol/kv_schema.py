"""What trainer, engine and tools call formats of the KV cache and KV scales; the standard library
only, so that all may import it."""

E4M3, INT8 = "e4m3", "int8"
"""``format`` of the KV cache in an engine's layout. E4M3 has scales of layers, which an update may
bring, and is what an engine means that does not say; INT8 has one of each token and head."""

WORKSPACE_BYTES = 512 << 20
"""Of GPU memory, in which prefill over an 8-bit KV cache keeps values (``ops/paged_prefill``)."""

KV_SCALES = "kv_scales"
"""The tensor of an update that holds them: FP32 ``[layers, 2, KV heads of the whole model]``."""
KV_SCALE_ROWS = ("k", "v")
"""What the rows of a layer are for."""
LEAST_KV_SCALE, LARGEST_KV_SCALE = 2.0**-48, 2.0**48
"""Products of two such scales are normal FP32 numbers, also times 448 ** 2 and 4096 channels. The
scale of a head of zeros is 2e-13 (``ops/reference.py``: AMAX_FLOOR / 448)."""
