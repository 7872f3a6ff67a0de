"""Block-FP8 GEMMs: which kernels an engine prepares before it serves."""
