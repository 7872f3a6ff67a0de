"""The GEMMs of FP8 linears and experts: which kernel serves a shape."""
