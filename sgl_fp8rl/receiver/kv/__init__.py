"""The scales of an 8-bit KV cache, and what is counted and written of it."""
