"""Names that several files share."""

NAME = "fp8rl"
"""The quantization's name, and the prefix of our keywords."""
