"""``sgl-fp8rl doctor``: what is installed, whether it is compatible, and whether it computes."""
