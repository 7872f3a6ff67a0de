"""An FP8 KV cache whose scales follow the policy."""
