"""Run a model on the same sequences again, with some of its layers changed.

Shapes: B sequences, L tokens of the longest, T measured tokens of all, H hidden, V vocabulary.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.tools.precision import fake_quant
from sgl_fp8rl.tools.precision.divergence import Divergence, token_divergence
from sgl_fp8rl.tools.precision.groups import Group
from sgl_fp8rl.tools.precision.tokens import Sequences

LOGITS_AT_ONCE = 1 << 25
"""Elements; a float64 copy of them takes 256 MiB."""


class Replay:
    """The logits of an unchanged model on some sequences, and what becomes of them.

    Logits are computed in FP32 from the last hidden state even for a BF16 model: rounded logits, as
    in an engine without --enable-fp32-lm-head, would hide the damage of layers.

    Args:
        model: a causal language model of transformers 5, in evaluation mode.
        batches: its inputs; the tokens under the mask are measured.

    Raises:
        ValueError: its logits are NaN or Inf.
    """

    def __init__(self, model: Any, batches: list[Sequences]) -> None:
        self._model, self._batches = model, batches
        self._layers: nn.ModuleList = model.get_decoder().layers
        self._head = model.get_output_embeddings().weight.detach().float()
        self._tokens_T = torch.cat([batch.tokens_BL[:, 1:][batch.measured] for batch in batches])
        self.tokens = self._tokens_T.numel()
        """Number of measured tokens."""
        self._logits = [part_TV.clone() for part_TV in self._logits_of(self._hidden())]
        if not all(bool(part.isfinite().all()) for part in self._logits):
            raise ValueError("the model's own logits are NaN or Inf; check its weights")

    @torch.inference_mode()
    def divergence(self, groups: Collection[Group]) -> Divergence:
        """How much logprobs change if these groups compute in FP8.

        Raises:
            ValueError: one of their weights or activations is NaN or Inf.
        """
        with fake_quant.fp8(groups):
            hidden_TH = self._hidden()
        tokens = self._tokens_T.split([len(part_TV) for part_TV in self._logits])
        parts = zip(self._logits, self._logits_of(hidden_TH), tokens, strict=True)
        kls, k3s = zip(*(token_divergence(*part) for part in parts), strict=True)
        return Divergence.of_tokens(torch.cat(kls), torch.cat(k3s))

    @torch.inference_mode()
    def _hidden(self) -> torch.Tensor:
        """What the last layer makes of the measured tokens, ``[T, H]``."""
        hiddens: list[torch.Tensor] = []
        with self._layers[-1].register_forward_hook(lambda *call: hiddens.append(call[-1])):
            for batch in self._batches:
                # right padding, which a causal model ignores: no mask
                self._model.get_decoder()(batch.tokens_BL, use_cache=False)
        pairs = zip(hiddens, self._batches, strict=True)
        return torch.cat([hidden[:, :-1][batch.measured] for hidden, batch in pairs])

    @torch.inference_mode()
    def _logits_of(self, hidden_TH: torch.Tensor) -> Iterator[torch.Tensor]:
        """FP32 logits ``[T, V]`` in parts that fit into memory.

        The model's own code computes them, with its last norm and softcap.
        """
        rows = max(1, LOGITS_AT_ONCE // self._model.config.get_text_config().vocab_size)
        for part_TH in hidden_TH.split(rows):
            with _in_place_of_layers(self._model, part_TH[None], self._head):
                ids = torch.zeros(part_TH.shape[:1], dtype=torch.long, device=part_TH.device)
                yield self._model(ids[None], use_cache=False).logits[0]


class _Given(nn.Module):
    """A decoder that returns hidden states computed before."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self._hidden


@contextmanager
def _in_place_of_layers(model: Any, hidden: torch.Tensor, head_VH: torch.Tensor) -> Iterator[None]:
    """Make the model's decoder layers return ``hidden`` and its head use ``head_VH``, FP32."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = decoder.layers

    def in_fp32(x: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(x.float(), head_VH, bias)

    decoder.layers = nn.ModuleList([_Given(hidden)])
    head.forward = in_fp32
    try:
        yield
    finally:
        decoder.layers = layers
        del head.forward
