"""The logprobs that a policy must give: transformers in FP32, with FP8 linears.

It shares no code with the plugin. Linears and experts take weights and inputs that were rounded to
E4M3 as an FP8 engine rounds them; attention reads K and V as they are. What is left of a difference
is the engine's BF16, which is much where it changes the FP8 codes of inputs, and its FP8 KV cache.
A reference in BF16 differs as much from this one as an engine with a BF16 KV cache does.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engine import models
from tests.gpu.policies import Tensors

BLOCK, E4M3_MAX = 128, 448.0
LEAST_AMAX = 1e-10
LOGITS = 1 << 27
"""Of one forward pass, at most: 512 MiB of FP32."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Sampled:
    """One sequence of a rollout."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


class Reference:
    """One policy outside of the engine.

    Args:
        config: folder with the ``config.json`` of the checkpoint.
        policy: BF16 tensors by HF names, on any device; dimensions are whole blocks of 128.

    Raises:
        ValueError: the policy is not all of the model.
    """

    def __init__(self, config: Path, policy: Tensors) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._device = next(iter(policy.values())).device
        with torch.device(self._device):
            self._model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config), dtype=torch.float32, attn_implementation="sdpa"
            )
        held = self._model.state_dict()
        if sum(t.numel() for t in held.values()) != sum(t.numel() for t in policy.values()):
            raise ValueError(f"the policy has other tensors than the model of {config}")
        for name, tensor in policy.items():
            is_fp8 = models.is_linear(name)
            _target(held, name).copy_(fake_quantize(tensor, BLOCK) if is_fp8 else tensor)
        for name, module in self._model.named_modules():
            if models.is_linear(f"{name}.weight"):
                module.forward = partial(_fp8_linear, module.weight)
            elif name.endswith(".experts"):
                module.forward = partial(_fp8_experts, module.gate_up_proj, module.down_proj)

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logprob of each token given those before it, at temperature 1.

        Args:
            sequences: token ids of each; they are padded on the right to batches.

        Returns:
            FP32 on the CPU, [tokens - 1] for each: of the second token to the last.
        """
        longest = max(map(len, sequences), default=1)
        size = max(1, LOGITS // (longest * self._model.config.vocab_size))
        starts = range(0, len(sequences), size)
        return [row for start in starts for row in self._batch(sequences[start : start + size])]

    def _batch(self, sequences: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        tokens_BT = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sequence) for sequence in sequences], batch_first=True
        ).to(self._device)
        logits_BTV = self._model(tokens_BT[:, :-1], use_cache=False).logits
        chosen_BT1 = tokens_BT[:, 1:, None]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, chosen_BT1).squeeze(-1).cpu()
        for row, sequence in zip(logprobs_BT, sequences, strict=True):
            yield row[: len(sequence) - 1]

    def distances(self, sampled: Sequence[Sampled]) -> list[torch.Tensor]:
        """|logprob that came with it - this policy's| of each sampled token, for each sequence."""
        rows = self.logprobs([one.prompt + one.tokens for one in sampled])
        return [
            (torch.tensor(one.logprobs) - row[len(row) - len(one.tokens) :]).abs()
            for one, row in zip(sampled, rows, strict=True)
        ]

    @torch.inference_mode()
    def next_logprobs(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logprob of each token of the vocabulary as the next one, FP32 [B, V]."""
        logits_BTV: torch.Tensor = self._model(tokens_BT, use_cache=False).logits
        return logits_BTV[:, -1].log_softmax(-1)


def fake_quantize(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Round to E4M3 by blocks of ``rows`` x 128 whose largest value is 448 (DeepSeek-V3, arXiv
    2412.19437, section 3.3).

    Args:
        x: [..., M, K], M a multiple of ``rows`` and K of 128.

    Returns:
        codes times scales, FP32 of the same shape.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, rows))
    amax = blocks.abs().amax((-1, -3), keepdim=True).clamp(min=LEAST_AMAX)
    scales = amax / torch.full_like(amax, E4M3_MAX)
    codes = (blocks / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scales).view(x.shape)


def _target(held: dict[str, Any], name: str) -> torch.Tensor:
    """Where transformers holds a tensor of the checkpoint: it stacks experts."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return held[name]  # type: ignore[no-any-return]
    experts, index, part = match.groups()
    if part == "down":
        return held[f"{experts}.down_proj"][int(index)]  # type: ignore[no-any-return]
    gate, up = held[f"{experts}.gate_up_proj"][int(index)].chunk(2)
    return gate if part == "gate" else up  # type: ignore[no-any-return]


def _fp8_linear(weight_NK: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
    return fake_quantize(x_MK, 1) @ weight_NK.T


def _fp8_experts(
    gate_up_EIH: torch.Tensor,
    down_EHI: torch.Tensor,
    x_MH: torch.Tensor,
    experts_MT: torch.Tensor,
    weights_MT: torch.Tensor,
) -> torch.Tensor:
    out_MH = torch.zeros_like(x_MH)
    for expert in experts_MT.unique().tolist():
        rows, ranks = torch.where(experts_MT == expert)
        gate, up = _fp8_linear(gate_up_EIH[expert], x_MH[rows]).chunk(2, -1)
        y = _fp8_linear(down_EHI[expert], nn.functional.silu(gate) * up)
        out_MH.index_add_(0, rows, y * weights_MT[rows, ranks, None])
    return out_MH
