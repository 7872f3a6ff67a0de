"""The trainer's logprobs of sampled tokens: what ``correct`` and the loss take.

Shapes: B sequences, L tokens of the longest prompt with response, T of the longest response, V
vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from trainer_bridge.arguments import real, token_rows


def response_logprobs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` of each response token, with gradient.

    Runs one forward pass over all sequences, padded on the right, which a causal model ignores. The
    logits of all sequences are in memory at once, so pass slices of a large batch. With FSDP2 every
    rank calls this with its own sequences.

    Args:
        model: a causal LM of transformers: ``model(tokens_BL, use_cache=False).logits`` is
            [B, L, V], of any float dtype.
        prompts: B lists of token ids: ``rollout.prompt_tokens``. One is empty only where its
            request failed. Arrays and tensors of integers, without padding, are taken as well.
        responses: B lists of token ids, possibly empty: ``rollout.tokens``.
        temperature: ``rollout.temperature``.

    Returns:
        float32 [B, T] on the logits' device, 0 after the end of a response. Logits are converted to
        float32 before the division.

    Raises:
        ValueError: no sequence is given, one holds other than token ids, the prompt of a response
            is empty, prompts and responses differ in number, or the temperature is not positive.
    """
    prompts = token_rows("response_logprobs: prompts", prompts)
    responses = token_rows("response_logprobs: responses", responses)
    temperature = real("response_logprobs: temperature", temperature)
    if not prompts or len(prompts) != len(responses):
        raise ValueError(
            f"response_logprobs: {len(prompts)} prompts and {len(responses)} responses; pass one "
            f"response per prompt, and at least one prompt"
        )
    empty = [bool(r) and not p for p, r in zip(prompts, responses, strict=True)]
    if any(empty):
        raise ValueError(
            f"response_logprobs: prompt {empty.index(True)} is empty; nothing predicts the first "
            f"token of its response"
        )
    if temperature == 0:
        raise ValueError(
            "response_logprobs: temperature 0 divides the logits; use rollout.temperature, which "
            "is 1 for greedy sampling"
        )
    # a row without a token is one of padding: attention over nothing would be NaN
    rows = [torch.tensor([*p, *r] or [0]) for p, r in zip(prompts, responses, strict=True)]
    tokens_BL = pad_sequence(rows, batch_first=True).to(model.device)
    lengths_B1 = torch.tensor([[len(response)] for response in responses])
    column_T = torch.arange(int(lengths_B1.max()))
    mask_BT = column_T < lengths_B1
    # The logits that predict response token t are one position before it.
    before_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts])
    position_BT = torch.where(column_T < lengths_B1, before_B1 + column_T, 0)
    logits_BLV = model(tokens_BL, use_cache=False).logits
    device = logits_BLV.device  # with CPU offload of FSDP2 the model's is another one
    tokens_BL, mask_BT, position_BT = (x.to(device) for x in (tokens_BL, mask_BT, position_BT))
    row_B1 = torch.arange(len(rows), device=device)[:, None]
    logprobs_BTV = (logits_BLV[row_B1, position_BT].float() / temperature).log_softmax(-1)
    targets_BT = torch.where(mask_BT, tokens_BL[row_B1, position_BT + mask_BT], 0)
    logprobs_BT: torch.Tensor = logprobs_BTV.gather(2, targets_BT[..., None])[..., 0]
    return logprobs_BT.masked_fill(~mask_BT, 0.0)
