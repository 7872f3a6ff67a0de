"""The logprobs that each policy must give: transformers in FP32, with FP8 linears.

The linears quantize weights and inputs by ``sgl_fp8rl.ops.reference``. What is left of a difference
is the engine's BF16, which is much where it changes the FP8 codes of inputs: a reference in BF16
differs as much from this one as the engine does.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from sgl_fp8rl.ops.reference import (
    dequantize_activation,
    dequantize_weight,
    quantize_activation,
    quantize_weight,
)
from tests.engine import models
from tests.gpu.policies import Tensors


class Reference:
    """One policy outside of the engine.

    Args:
        config: folder with the ``config.json`` of the checkpoint.
        policy: BF16 tensors by HF names, on any device.
    """

    def __init__(self, config: Path, policy: Tensors) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._device = next(iter(policy.values())).device
        with torch.device(self._device):
            self._model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config), dtype=torch.float32, attn_implementation="sdpa"
            )
        self._model.load_state_dict(policy)
        for name, module in self._model.named_modules():
            if models.is_linear(f"{name}.weight"):
                weight_NK = dequantize_weight(*quantize_weight(policy[f"{name}.weight"]))
                module.forward = partial(_fp8_linear, weight_NK)

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logprob of each token given those before it, at temperature 1.

        Args:
            sequences: token ids of each; they are padded on the right to one batch.

        Returns:
            FP32 on the CPU, [tokens - 1] for each: of the second token to the last.
        """
        tokens_BT = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sequence) for sequence in sequences], batch_first=True
        ).to(self._device)
        logits_BTV = self._model(tokens_BT[:, :-1], use_cache=False).logits
        chosen_BT1 = tokens_BT[:, 1:, None]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, chosen_BT1).squeeze(-1).cpu()
        return [row[: len(s) - 1] for row, s in zip(logprobs_BT, sequences, strict=True)]

    @torch.inference_mode()
    def next_logprobs(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logprob of each token of the vocabulary as the next one, FP32 [B, V]."""
        logits_BTV: torch.Tensor = self._model(tokens_BT, use_cache=False).logits
        return logits_BTV[:, -1].log_softmax(-1)


def _fp8_linear(weight_NK: torch.Tensor, x_BTK: torch.Tensor) -> torch.Tensor:
    x = dequantize_activation(*quantize_activation(x_BTK))
    return (x @ weight_NK.T).to(x_BTK.dtype)
