"""The trainer's logprobs of sampled tokens: what ``correct`` and the loss take.

Shapes: B sequences, L tokens of the longest prompt with response, T of the longest response, V
vocabulary.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from sgl_fp8rl.protocol.values import real, token_rows
from trainer_bridge.kv.fp8_attention import attend_as_sampled
from trainer_bridge.ranks.group import Local
from trainer_bridge.rollouts import head
from trainer_bridge.rollouts.batch import Rollout
from trainer_bridge.rollouts.chunks import Asked, Found
from trainer_bridge.router_replay import replay_routing

logger = logging.getLogger(__name__)
_warned: set[str] = set()


@overload
def response_logprobs(
    model: Any,
    prompts: Rollout | Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]] | None = None,
    temperature: float | None = None,
    *,
    entropy: Literal[False] = False,
    micro_batch_tokens: int | None = None,
    replay: bool = False,
    group: dist.ProcessGroup | Local | None = None,
) -> torch.Tensor: ...


@overload
def response_logprobs(
    model: Any,
    prompts: Rollout | Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]] | None = None,
    temperature: float | None = None,
    *,
    entropy: Literal[True],
    micro_batch_tokens: int | None = None,
    replay: bool = False,
    group: dist.ProcessGroup | Local | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def response_logprobs(
    model: Any,
    prompts: Rollout | Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]] | None = None,
    temperature: float | None = None,
    *,
    entropy: bool = False,
    micro_batch_tokens: int | None = None,
    replay: bool = False,
    group: dist.ProcessGroup | Local | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``log_softmax(logits / temperature)`` of each response token, with gradient.

    Runs one forward pass over all sequences, padded on the right, which a causal model ignores; in
    a job of several ranks one more at the first call for a model, without gradient. Logits are
    computed in chunks of 256 MiB, in ``backward`` again; where ``rollouts/head.py`` cannot, all are
    in memory at once. Pass ``rollout[rows]`` of a large batch, for each ``rows`` of
    ``rollout.micro_batches``. With FSDP2 every rank calls this with its own sequences, of which
    there may be none.

    A model of ``fp8_forward`` attends under ``rollout.kv_scales``, and keeps them.

    A model in training mode that drops out values, as the engine does not, is warned of once.

    Args:
        model: a causal LM of transformers, or a wrapper of one: ``model(tokens_BL,
            use_cache=False).logits`` is [B, L, V], of any float dtype.
        prompts: a rollout; or, of other data, B lists of token ids (arrays and tensors of integers,
            without padding, are taken as well). One is empty only where its request failed.
        responses: of other data, B lists of token ids, possibly empty.
        temperature: that other data were sampled at, by default 1.
        entropy: return the entropy of each token's distribution too, in nats.
        micro_batch_tokens: without gradient, compute ``rollout.micro_batches`` of so many tokens
            one after the other.
        replay: route each token to the experts that the engine chose, ``rollout.routed_experts``.
            With a gradient under activation checkpointing, run this and backward inside of
            ``replay_routing`` instead.
        group: the ranks that do so together, of which each must call; as for ``correct``.

    Returns:
        float32 [B, T] on the logits' device, 0 after the end of a response; with ``entropy`` two of
        these. Logits are converted to float32 before the division.

    Raises:
        ValueError: no sequence is given, the prompt of a response is empty, prompts and responses
            differ in number or hold what is no token id of the model, the temperature is not
            positive and finite, or the model returns no logits of all tokens.
        RuntimeError: the model does something else with its logits than at the first call.
    """
    if micro_batch_tokens is not None:
        found = _by_micro_batches(model, prompts, micro_batch_tokens, group, entropy, replay)
    else:
        found = _in_one_pass(model, prompts, responses, temperature, entropy, replay)
    return (found[0], found[1]) if entropy else found[0]


def _in_one_pass(
    model: Any, prompts: Any, responses: Any, temperature: float | None, entropy: bool, replay: bool
) -> list[torch.Tensor]:
    """Logprobs, and entropies where they are asked for, [B, T]."""
    count, replayed = None, _replayed(model, prompts) if replay else nullcontext()
    if isinstance(prompts, Rollout):
        if responses is not None or temperature is not None:
            raise ValueError(
                "response_logprobs: a rollout has its responses and temperature; pass it alone"
            )
        if isinstance(model, nn.Module):
            attend_as_sampled(model, prompts.kv_scales or [])
        count, temperature = len(prompts), prompts.temperature
        responses, prompts = prompts.tokens or [[]], prompts.prompt_tokens or [[]]
    prompts = token_rows("response_logprobs: prompts", prompts)
    responses = token_rows("response_logprobs: responses", responses)
    temperature = 1.0 if temperature is None else temperature
    temperature = real("response_logprobs: temperature", temperature)
    if not prompts or len(prompts) != len(responses):
        raise ValueError(
            f"response_logprobs: {len(prompts)} prompts and {len(responses)} responses; pass one "
            f"response per prompt, and at least one prompt"
        )
    empty = [len(r) > 0 and not len(p) for p, r in zip(prompts, responses, strict=True)]
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
    tokens_BL = pad_sequence(rows, batch_first=True)
    lengths_B1 = torch.tensor([[len(response)] for response in responses])
    column_T = torch.arange(int(lengths_B1.max()))
    mask_BT = column_T < lengths_B1
    index_N = mask_BT.flatten().nonzero()[:, 0]
    # The logits that predict response token t are one position before it.
    before_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts])
    first_B1 = torch.arange(len(rows))[:, None] * tokens_BL.shape[1]
    at_N = (first_B1 + before_B1 + column_T).flatten()[index_N]
    asked = Asked(at_N, tokens_BL.flatten()[at_N + 1], temperature, entropy)
    if isinstance(model, nn.Module):
        _check_model(model, tokens_BL)
        _warn_of_dropout(model)
    with replayed:
        output, found = head.forward(model, tokens_BL.to(_device_of(model)), asked)
    if found is None:
        found = _of_logits(output, tokens_BL, asked)
    index_N = index_N.to(found[0].device)
    rows_N = [x_N.new_zeros(mask_BT.numel()).index_copy(0, index_N, x_N) for x_N in found]
    return [each.view_as(mask_BT)[:count] for each in rows_N]


def _of_logits(output: Any, tokens_BL: torch.Tensor, asked: Asked) -> Found:
    logits_BLV = getattr(output, "logits", None)
    if not isinstance(logits_BLV, torch.Tensor) or logits_BLV.shape[:2] != tokens_BL.shape:
        raise ValueError(
            f"response_logprobs: the model returned a {type(output).__name__} that has no logits "
            f"of {tuple(tokens_BL.shape)} tokens; pass a causal LM, with return_dict True"
        )
    _check_ids(asked.targets_N, logits_BLV.shape[2])
    asked = asked.on(logits_BLV.device)  # with CPU offload of FSDP2 the model's is another one
    logits_NV = logits_BLV.flatten(0, 1)[asked.index_N].float()
    logprobs_NV = (logits_NV / asked.temperature).log_softmax(-1)
    found = [logprobs_NV.gather(1, asked.targets_N[:, None])[:, 0]]
    return [*found, -(logprobs_NV.exp() * logprobs_NV).sum(-1)] if asked.entropy else found


def _replayed(model: Any, rollout: Any) -> AbstractContextManager[Any]:
    if not isinstance(rollout, Rollout) or (len(rollout) and rollout.routed_experts is None):
        raise ValueError(
            "response_logprobs: replay is for a rollout that was sampled with routed_experts=True"
        )
    modules = model.modules() if torch.is_grad_enabled() else ()
    # of transformers, and of torch's CheckpointWrapper
    if any(
        (each.training and getattr(each, "gradient_checkpointing", False))
        or hasattr(each, "checkpoint_impl")
        for each in modules
    ):
        raise ValueError(
            "response_logprobs: backward recomputes checkpointed activations, and would route them "
            "without replay; run both inside of replay_routing(model, rollout.routed_experts, "
            "attention_mask=rollout.sequence_mask_BL)"
        )
    mask_BL = rollout.sequence_mask_BL
    return replay_routing(model, rollout.routed_experts or [], attention_mask=mask_BL)


def _by_micro_batches(
    model: Any,
    rollout: Any,
    tokens: int,
    group: dist.ProcessGroup | Local | None,
    entropy: bool,
    replay: bool,
) -> list[torch.Tensor]:
    if not isinstance(rollout, Rollout) or torch.is_grad_enabled():
        raise ValueError(
            "response_logprobs: micro_batch_tokens is for a rollout under torch.no_grad(); with a "
            "gradient, call it for each of rollout.micro_batches, and backward"
        )
    found: list[torch.Tensor] = []
    for rows in rollout.micro_batches(tokens, group=group):
        parts = _in_one_pass(model, rollout[rows], None, None, entropy, replay)
        found = found or [part_RT.new_zeros(rollout.mask_BT.shape) for part_RT in parts]
        for found_BT, part_RT in zip(found, parts, strict=True):
            found_BT[rows, : part_RT.shape[1]] = part_RT
    if not found:
        raise ValueError("response_logprobs: the rollout is empty; pass at least one sequence")
    return found


def _check_ids(ids: torch.Tensor, vocabulary: int | None) -> None:
    """A GPU would not say which id it was, and compute nothing more."""
    if vocabulary is None or not ids.numel():
        return
    least, most = map(int, ids.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"response_logprobs: token id {least if least < 0 else most} is not one of the "
            f"model's {vocabulary}; pass ids of the engine's model, without padding"
        )


def _check_model(model: nn.Module, tokens_BL: torch.Tensor) -> None:
    """What a model of transformers, whatever wraps it, would fail at with errors of its own."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "get_input_embeddings"):
            if getattr(getattr(module, "config", None), "return_dict", True) is False:
                raise ValueError(
                    "response_logprobs: config.return_dict is False, with which transformers "
                    "returns no logits by name; set it to True"
                )
            with suppress(NotImplementedError):  # transformers does not find it
                embedding = module.get_input_embeddings()
                _check_ids(tokens_BL, getattr(embedding, "num_embeddings", None))
            return


def _device_of(model: Any) -> torch.device:
    """A wrapper may have none."""
    device: torch.device | None = getattr(model, "device", None)
    return device if device is not None else next(model.parameters()).device


def _warn_of_dropout(model: nn.Module) -> None:
    """Of what is random in training: modules of dropout, and probabilities that others pass on."""
    for path, module in model.named_modules():
        numbers = vars(module).items() if module.training else ()
        for name, value in numbers:
            if not isinstance(value, float) or value <= 0:
                continue
            if not re.search(
                "drop(?!less)|jitter", f"{type(module).__name__}.{name}", re.IGNORECASE
            ):
                continue
            found = f"{path}.{name} is {value}"
            if found not in _warned:
                _warned.add(found)
                logger.warning(
                    "response_logprobs: the model is in training mode and %s, so logprobs are of "
                    "another policy than the engine's; set it to 0, or call model.eval(), which "
                    "also ends gradient checkpointing of transformers (logged once)",
                    found,
                )
            return
