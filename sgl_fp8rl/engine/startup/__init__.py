"""From flags to a model that serves: checks, weights, kernels and the KV cache."""
