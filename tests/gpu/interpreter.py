"""Triton's interpreter, corrected where it computes what no GPU does.

Seen in 3.6: a cast to BF16 cuts off, a cast to FP8 rounds ties away from zero and loses a carry
into the exponent, and ``fma`` rounds the product. ``xor_sum`` is right, and takes a second for what
NumPy does in a millisecond.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

_TORCH = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {
    8: (torch.uint8, np.uint8),
    16: (torch.uint16, np.uint16),
    32: (torch.uint32, np.uint32),
}


def _convert(x: NDArray[Any], source: tl.dtype, target: tl.dtype, rounding: object) -> NDArray[Any]:
    bits = np.ascontiguousarray(x).view(_BITS[source.primitive_bitwidth][1])
    values = torch.from_numpy(bits).view(_TORCH[source]).to(_TORCH[target])
    return values.view(_BITS[target.primitive_bitwidth][0]).numpy().reshape(x.shape)


def _fma(
    builder: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle
) -> TensorHandle:
    # The product of two FP32 is exact in FP64; the sum is rounded twice, which shows in one result
    # of 2**29 and never in a division's remainder, which FP32 holds.
    exact = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


_reduce = ReduceOps.apply_impl


def _reduce_fast(self: ReduceOps, inputs: tuple[tl.tensor, ...]) -> Any:
    if self.combine_fn != tl.standard._xor_combine:
        return _reduce(self, inputs)
    (x,) = inputs
    total = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(total, x.dtype)


def correct() -> None:
    """Patch this process's interpreter."""
    ReduceOps.apply_impl = _reduce_fast
    interpreter._convert_float = _convert
    InterpreterBuilder.create_fma = _fma
