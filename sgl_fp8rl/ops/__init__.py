"""Kernels: NAME.py is the reference, in torch, NAME_triton.py and NAME_cuda.py the GPU's."""
