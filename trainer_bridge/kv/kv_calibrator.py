"""Calibrate an FP8 KV cache on the trainer: measure K and V in its own forward.

Shape suffixes: B sequences, T tokens, D head dim, H KV heads, L layers, R rows (K, V:
``sgl_fp8rl.protocol.kv_schema.KV_SCALE_ROWS``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.ops.kv import power_of_two_above
from sgl_fp8rl.ops.reference import AMAX_FLOOR, FP8_MAX
from sgl_fp8rl.protocol.kv_schema import KV_SCALE_ROWS
from sgl_fp8rl.protocol.values import real, whole
from trainer_bridge.kv.attention_hooks import Watch, text_config
from trainer_bridge.ranks.group import device_of

# Magnitudes are compared and counted by their FP32 bits: as integers these have the same order,
# with Inf and NaN on top, so NaN also survives a maximum over ranks.
MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
UNSEEN = -1
SHIFT = 23 - 4
"""A histogram bin holds one exponent and the upper 4 mantissa bits: 1/16 of an octave."""
BINS = (MAGNITUDE >> SHIFT) + 1


class KVCalibrator:
    """Measures K and V over the tokens of a step, on the device, and computes KV scales.

    The measure is ``amax``, the largest magnitude per layer, row (K, V) and KV head. A forward that
    activation checkpointing recomputes in the backward is not counted twice.

    Args:
        layers: number of attention layers of the model.
        kv_heads: KV heads per layer of the whole model.
        percentile: above 0, up to 100: replaces ``amax`` by this percentile of all elements (of all
            ranks and micro-batches, in one histogram), rounded up by at most 1/16. It takes 32 KiB
            per layer, row and head, and more time; larger elements are clipped.
        margin: factor by which later tokens may exceed the measure before they are clipped, and up
            to twice that, since scales are rounded up. E4M3 is a float, so a margin of 2 costs
            precision only below 2^-12.8 of the measure: headroom is nearly free.
        decay: share of the last step's measure that is kept if this step's is smaller, in [0, 1);
            a larger measure takes effect at once.
        group: ranks that share the tokens of a step; default all.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        *,
        percentile: float | None = None,
        margin: float = 2.0,
        decay: float = 0.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        layers = whole("KVCalibrator: layers", layers, least=1)
        kv_heads = whole("KVCalibrator: kv_heads", kv_heads, least=1)
        if percentile is not None:
            percentile = real("KVCalibrator: percentile", percentile, above=True, most=100.0)
        margin = real("KVCalibrator: margin", margin, above=True)
        decay = real("KVCalibrator: decay", decay, most=1.0)
        if decay == 1.0:
            raise ValueError("KVCalibrator: decay is 1.0; pass a number from 0, below 1")
        self.layers, self.kv_heads = layers, kv_heads
        self.percentile, self.margin, self.decay = percentile, margin, decay
        self._group = group
        self._statistics: torch.Tensor | None = None
        """LRH, int32: bits of the largest magnitude; with a percentile LRHx4096, int64: counts."""
        self._kept: torch.Tensor | None = None
        """LRH, float64: the last step's measure."""

    @classmethod
    def of(cls, model: nn.Module, **options: Any) -> "KVCalibrator":
        """A calibrator with the layers and heads of a transformers model.

        Args:
            model: a transformers model, plain or wrapped.
            options: keyword arguments of ``KVCalibrator``.

        Returns:
            The calibrator.

        Raises:
            ValueError: the model has no transformers config.
        """
        config = text_config(model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(config.num_hidden_layers, heads, **options)

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Observe every forward of a transformers model in this context.

        It sees the key and value that the attention function gets, after QK-norm and RoPE, under
        every attention implementation, and changes nothing. Tokens at which ``attention_mask`` is 0
        do not count. Compiled code is not observed: run it inside
        ``torch.compiler.set_stance("force_eager")``.

        Args:
            model: a transformers model, plain or wrapped.

        Raises:
            ValueError: this is not a transformers model; call ``observe`` in its attention.
            ValueError: (in the forward) the mask is not ``[B, T]``, a KV cache holds earlier
                tokens, or ``observe`` refuses.
        """
        with Watch(self.observe, model).reporting():
            yield

    @torch.no_grad()
    def observe(
        self,
        layer: int,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        mask_BT: torch.Tensor | None = None,
    ) -> None:
        """Observe the attention inputs of one layer, without a copy to the host or a device sync.

        Args:
            layer: index of the layer, from 0.
            k_BHTD: key after QK-norm and RoPE, any float dtype, not repeated for the query heads.
            v_BHTD: value, not repeated for the query heads.
            mask_BT: tokens at which it is 0 (or False) do not count.

        Raises:
            ValueError: the shapes do not match each other, the layers or the KV heads.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # inside a backward: this forward was observed before
        self._check(layer, k_BHTD, v_BHTD, mask_BT)
        if self._statistics is None:
            self._statistics = self._empty(k_BHTD.device)
        counts = None if mask_BT is None else mask_BT.to(k_BHTD.device) != 0
        take = self._take_amax if self.percentile is None else self._take_counts
        for row, x in enumerate((k_BHTD, v_BHTD)):
            if x.numel():
                take(self._statistics[layer, row], x.detach(), counts)

    def scales(self) -> torch.Tensor:
        """The KV scales of everything observed since the last call; begins a new step.

        This is a collective call of all ranks of the group, if torch.distributed is initialized.

        Returns:
            FP32 ``[L, 2, H]``, the same on each rank: ``max(measure, 1e-10) * margin / 448``,
            rounded up to a power of two, so that prefill's values, code times scale, are exact in
            BF16. If torch.distributed is initialized and can reduce there, on the CPU.

        Raises:
            ValueError: a layer saw no tokens, or NaN or Inf; raised on every rank.
        """
        amax_LRH = self._measure(self._merged())
        if self._kept is not None:
            kept = self.decay * self._kept + (1 - self.decay) * amax_LRH
            amax_LRH = torch.maximum(amax_LRH, kept)
        self._kept = amax_LRH
        return power_of_two_above((amax_LRH.clamp(min=AMAX_FLOOR) * self.margin / FP8_MAX).float())

    def _check(
        self,
        layer: int,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        mask_BT: torch.Tensor | None,
    ) -> None:
        if not 0 <= layer < self.layers:
            raise ValueError(
                f"layer {layer} was observed by a calibrator of {self.layers} layers; make it with "
                f"as many layers as the model has"
            )
        k_shape, v_shape = tuple(k_BHTD.shape), tuple(v_BHTD.shape)
        is_alike = len(k_shape) == len(v_shape) == 4 and k_shape[:3] == v_shape[:3]
        if not is_alike or k_shape[1] != self.kv_heads:
            raise ValueError(
                f"layer {layer} has K of shape {k_shape} and V of {v_shape}; pass [batch, heads, "
                f"tokens, head dim] with {self.kv_heads} heads, before they are repeated for Q"
            )
        if mask_BT is not None and mask_BT.shape != (k_shape[0], k_shape[2]):
            raise ValueError(
                f"layer {layer} has K of shape {k_shape} and a mask of shape "
                f"{tuple(mask_BT.shape)}; pass [batch, tokens], 0 where a token is padding"
            )

    def _empty(self, device: torch.device) -> torch.Tensor:
        shape = self.layers, len(KV_SCALE_ROWS), self.kv_heads
        with torch.inference_mode(False):  # it is written inside and outside of inference mode
            if self.percentile is None:
                return torch.full(shape, UNSEEN, dtype=torch.int32, device=device)
            return torch.zeros((*shape, BINS), dtype=torch.int64, device=device)

    def _take_amax(
        self, bits_H: torch.Tensor, x_BHTD: torch.Tensor, counts_BT: torch.Tensor | None
    ) -> None:
        # a NaN may still have a sign
        bits_BHT = x_BHTD.abs().amax(-1).float().view(torch.int32) & MAGNITUDE
        if counts_BT is not None:
            bits_BHT = torch.where(counts_BT[:, None], bits_BHT, UNSEEN)
        torch.maximum(bits_H, bits_BHT.amax((0, 2)), out=bits_H)

    def _take_counts(
        self, counts_HX: torch.Tensor, x_BHTD: torch.Tensor, counts_BT: torch.Tensor | None
    ) -> None:
        one = counts_HX.new_ones(())
        # one head at a time: the indices take 8 bytes per element
        for head, x in enumerate(x_BHTD.unbind(1)):
            bits = x.float().contiguous().view(torch.int32) & MAGNITUDE
            weights = one if counts_BT is None else counts_BT[..., None].to(one.dtype)
            index = (bits >> SHIFT).long()
            counts_HX[head].scatter_add_(0, index.view(-1), weights.expand_as(index).reshape(-1))

    def _merged(self) -> torch.Tensor:
        """The statistics of all ranks; begins a new step."""
        statistics, self._statistics = self._statistics, None
        if not (dist.is_available() and dist.is_initialized()):
            return self._empty(torch.device("cpu")) if statistics is None else statistics
        # one kind of device: nothing may have been observed here, and yet on another rank
        device = device_of(self._group, torch.device("cpu"))
        statistics = self._empty(device) if statistics is None else statistics.to(device)
        by = dist.ReduceOp.MAX if self.percentile is None else dist.ReduceOp.SUM
        dist.all_reduce(statistics, by, group=self._group)
        return statistics

    def _measure(self, statistics: torch.Tensor) -> torch.Tensor:
        """LRH, float64."""
        if self.percentile is None:
            bad_LR = (statistics >= INF).any(-1)
            unseen_L = (statistics == UNSEEN).flatten(1).any(1)
            bits_LRH = statistics
        else:
            bad_LR = statistics[..., INF >> SHIFT :].sum((-2, -1)) > 0
            below_LRHX = statistics.cumsum(-1)
            count_LRH1 = below_LRHX[..., -1:]
            unseen_L = (count_LRH1 == 0).flatten(1).any(1)
            rank_LRH1 = (count_LRH1.double() * (self.percentile / 100)).ceil()
            bins_LRH = (below_LRHX < rank_LRH1).sum(-1)
            bits_LRH = (((bins_LRH + 1) << SHIFT).clamp(max=INF - 1)).int()
        faults = torch.cat((unseen_L[:, None], bad_LR), 1).tolist()
        for layer, (unseen, *bad) in enumerate(faults):
            if unseen:
                raise ValueError(
                    f"layer {layer} saw no tokens since the last scales(); run a forward of the "
                    f"whole model, not compiled, under watch(), or observe each layer"
                )
            if any(bad):
                row = KV_SCALE_ROWS[bad.index(True)].upper()
                raise ValueError(
                    f"layer {layer} has NaN or Inf in {row}; check the trainer's weights"
                )
        return bits_LRH.view(torch.float32).double()
