"""Layers that SGLang builds with our methods, and the sampler."""
