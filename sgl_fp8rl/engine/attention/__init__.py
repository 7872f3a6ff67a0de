"""Attention over an 8-bit KV cache, in place of a backend's own calls."""
