"""``sgl-fp8rl precision``: which layers' FP8 moves logprobs most, and which to leave in BF16."""
