"""``sgl-fp8rl precision``: which layers lose most by FP8."""
