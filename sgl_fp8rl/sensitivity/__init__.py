"""``sgl-fp8rl precision``: which layers change logprobs most in FP8, and which to keep in BF16."""
