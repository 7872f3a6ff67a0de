"""Names that several files share."""

NAME = "fp8rl"
"""The name of the quantization, and the prefix of our keywords."""
