"""The block-FP8 matrix product: which kernels an engine prepares before it serves."""
