"""The quantized linears: SGLang's own methods on storage whose addresses never change."""

from collections.abc import Sequence
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import linear as gemm
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, mark, marked_format
from sgl_fp8rl.formats.padding import Padding, Shard, fit, pad_storage
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.activation import Channels
from sgl_fp8rl.ops.reference import fp8_linear


class FP8RLLinearMethod(compat.Fp8LinearMethod):  # type: ignore[misc]
    """Codes in ``weight`` [N, K] e4m3, scales in ``weight_scale_inv`` [N/128, K/128] FP32."""

    format: WeightFormat = BLOCK_FP8
    kernel: gemm.Kernel | None = None
    """What multiplies codes that are ready; None where SGLang's own operator runs."""
    padding: Padding | None = None
    """What of N and K is padding; inputs and results of the layer have none."""

    def __init__(self, quant_config: Any, prefix: str) -> None:
        super().__init__(quant_config)
        self.prefix = prefix

    @property
    def within(self) -> Channels | None:
        """Where the columns lie among zeros; None where there are none."""
        if self.padding is None or not self.padding.cols.is_padded:
            return None
        ((lead, _),) = self.padding.cols.spans
        return Channels(lead, self.padding.cols.size)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        check_activations(self.format, kwargs.get("params_dtype"))
        cols, rows = input_size_per_partition, output_partition_sizes
        self.sizes, self.options = (cols, rows, input_size, output_size, *args), dict(kwargs)
        # Only here are the sizes of this rank known; the layer keeps BF16 as a whole.
        reason = BLOCK_FP8.refusal(rows, cols)
        if reason is not None and self.quant_config.ragged == "pad":
            found = shards(layer, cols, rows, input_size, output_size)
            if found is not None:
                self.padding, reason = fit(BLOCK_FP8, *found)
        if reason is not None:
            self.keep_bf16(layer, reason)
            return
        if self.padding is not None:
            kwargs["skip_block_quant_check"] = True
        super().create_weights(layer, *self.sizes, **kwargs)
        if self.padding is not None:
            pad_storage(layer.weight, layer.weight_scale_inv, self.padding, BLOCK_FP8.block)
        mark(layer.weight, self.format)

    def keep_bf16(self, layer: Any, reason: str) -> None:
        """Give the layer BF16 weights, in the place of those that it has, with the sizes and
        loaders that SGLang asked for."""
        layer.fp8rl_reason = reason
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.quant_method = compat.UnquantizedLinearMethod()
        # SGLang chose the loader by the name of our class; BF16 parameters need the other
        options = self.options | {"weight_loader": layer.weight_loader}
        layer.quant_method.create_weights(layer, *self.sizes, **options)

    def process_weights_after_loading(self, layer: Any) -> None:
        keep_storage(super().process_weights_after_loading, layer, self.prefix)

    def apply(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.padding is None:
            return self._multiply(layer, x, bias)
        y = self.padding.rows.cut(self._multiply(layer, x))
        return y if bias is None else y.add_(bias)

    def _multiply(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        kernel, power_of_two = self.kernel, self.format.power_of_two_scales
        on_cpu = kernel is None and layer.weight.device.type == "cpu"
        if kernel is None and power_of_two and not on_cpu:  # SGLang's would not round scales
            kernel = gemm.triton
        # a compiled model traces SGLang's own operators, and could not trace through ours
        if kernel is not None and not torch.compiler.is_compiling():
            return gemm.linear(kernel, layer, x, bias, self.within, power_of_two=power_of_two)
        x = x if self.padding is None else self.padding.cols.pad(x)
        if on_cpu:
            scales = layer.weight_scale_inv
            return fp8_linear(x, layer.weight, scales, bias, power_of_two=power_of_two)
        check_stock_kernels(self.format)
        return super().apply(layer, x, bias)  # type: ignore[no-any-return]


class FP8RLUE8M0LinearMethod(FP8RLLinearMethod):
    """With scales that are powers of two, of the activations too."""

    format = BLOCK_FP8_UE8M0


def check_activations(format_: WeightFormat, dtype: torch.dtype | None) -> None:
    """Check that a layer's activations can be quantized: our kernels round scales of BF16 alone."""
    if format_.power_of_two_scales and dtype is torch.float16 and torch.cuda.is_available():
        raise ValueError(
            f"an FP16 model cannot be served in {format_.name} on a GPU; add --dtype bfloat16, or "
            f"choose another fp8rl-format"
        )


def check_stock_kernels(format_: WeightFormat) -> None:
    """Check that SGLang's own operators may compute a layer: they round no scales up."""
    if format_.power_of_two_scales:
        raise RuntimeError(
            f"SGLang's kernels, which run in a compiled model and for unusual experts, do not "
            f"quantize activations as {format_.name} does; drop --enable-torch-compile and "
            f"--cuda-graph-backend-prefill tc_piecewise, or choose --fp8rl-format block-fp8"
        )


def shards(
    layer: Any, cols: int, rows: Sequence[int], all_cols: int, all_rows: int
) -> tuple[list[Shard], Shard] | None:
    """The part of its rows, for each matrix that is stacked, and of its columns that a rank keeps.

    None where not all ranks of the engine share them, for which rank has what is not known then.
    """
    group = compat.get_tp_group()

    def shard(size: int, count: int, replicas: int = 1) -> Shard:
        return Shard(size, group.rank_in_group % count // replicas, count // replicas)

    count_rows, count_cols = all_rows // sum(rows), all_cols // cols
    if not {count_rows, count_cols} <= {1, group.world_size}:
        return None
    # with fewer KV heads than ranks, several ranks have the same ones
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    first, *others = rows
    stacked = [shard(first, count_rows), *(shard(n, count_rows, replicas) for n in others)]
    return stacked, shard(cols, count_cols)


METHODS: dict[str, Any] = {
    BLOCK_FP8.name: FP8RLLinearMethod,
    BLOCK_FP8_UE8M0.name: FP8RLUE8M0LinearMethod,
}
"""By format: what computes in a linear layer, and keeps a layer in BF16 by ``keep_bf16``."""


def keep_storage(post_process: Any, layer: Any, name: str) -> None:
    """Run SGLang's post-processing and refuse a backend that repacks or moves the weights.

    Updates write into the storage that captured CUDA graphs read, in the layout that routes were
    recorded for; a repacked layout would be corrupted by the next update.
    """
    if all(parameter.device.type == "cpu" for parameter in layer.parameters()):
        return  # SGLang's CPU post-processing packs for AMX; ours computes on the plain layout
    before = _storage_of(layer)
    post_process(layer)
    if _storage_of(layer) != before:
        raise RuntimeError(
            f"the FP8 backend chosen for {name} repacks weights, which in-place updates cannot "
            f"follow; start with --fp8-gemm-backend triton --moe-runner-backend triton"
        )


def _storage_of(layer: Any) -> dict[str, tuple[Any, ...]]:
    # plain tensors too: a backend's own copy of the scales would be stale after an update
    tensors = {n: t for n, t in vars(layer).items() if isinstance(t, torch.Tensor)}
    tensors.update(layer.named_parameters())
    return {
        name: (
            *(t.data_ptr(), t.dtype, t.shape, t.stride(), bool(getattr(t, "format_ue8m0", False))),
            marked_format(t),  # lost, the next update would not round scales
        )
        for name, t in tensors.items()
    }
