"""Measure kernels and tiles, and compile them before they serve."""
