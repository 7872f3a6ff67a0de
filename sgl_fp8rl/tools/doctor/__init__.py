"""``sgl-fp8rl doctor``: whether this installation can serve."""
