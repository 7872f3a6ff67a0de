"""Router replay: the trainer's forward pass uses the experts that the rollout engine chose.

The method is R3 ("Rollout Routing Replay", arXiv 2510.11370): each router still computes its
logits and softmax, with gradient; the selected experts are the recorded ones, and their gates are
gathered from the router's own probabilities, renormalized if the model does that.

It uses forward hooks on the router modules of transformers 5 (those that return logits, gates and
experts); nothing is patched, and the block removes its hooks.

Shapes: N tokens of a forward pass, in the order of ``input_ids`` flattened; S rows of a sequence,
L MoE layers, K experts a token, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainer_bridge.router_replay.token_map import NOWHERE, TokenMap

GATE_TOLERANCE = 1e-5
"""Between the gates computed here and the router's own, for its own choice. Healthy: 0 in BF16 and
FP32, 6e-8 in FP64, where transformers' softmax stays FP32; a sigmoid router differs by 0.01 or
more."""


class RoutingRecord:
    """The routers' own choice in the last forward pass, replayed or not."""

    def __init__(self, tokens: TokenMap, layers: int) -> None:
        self.tokens = tokens
        self._chosen_NK: list[torch.Tensor | None] = [None] * layers

    def note(self, layer: int, own_NK: torch.Tensor) -> None:
        """Keep the choice of one router."""
        self._chosen_NK[layer] = own_NK.detach().to(torch.int16)

    def check(self) -> None:
        """Check that all routers ran: those of a compiled model run without hooks.

        Raises:
            ValueError: one did not.
        """
        ran = sum(chosen is not None for chosen in self._chosen_NK)
        if ran < len(self._chosen_NK):
            raise ValueError(
                f"router replay: {ran} of {len(self._chosen_NK)} routers ran with their hooks; run "
                f"the whole model inside the block, not compiled"
            )

    @property
    def experts(self) -> list[torch.Tensor]:
        """One int16 CPU tensor ``[tokens, L, K]`` per sequence, for ``routing_disagreement``.

        Raises:
            ValueError: no forward pass went through all routers.
        """
        self.check()
        chosen = [own_NK for own_NK in self._chosen_NK if own_NK is not None]
        return self.tokens.split(torch.stack(chosen, dim=1).cpu())


@contextmanager
def record_routing(
    model: nn.Module,
    *,
    attention_mask: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> Iterator[RoutingRecord]:
    """Record which experts the trainer's routers choose, without changing anything.

    Args:
        model: as in ``replay_routing``.
        attention_mask: as in ``replay_routing``.
        sequence_ids: as in ``replay_routing``.
        position_ids: as in ``replay_routing``.

    Yields:
        The routers' choice in the last forward pass.

    Raises:
        ValueError: as ``replay_routing``.
    """
    routers = _routers(model)
    tokens = TokenMap.of(attention_mask, sequence_ids, position_ids)
    with _hooks(routers, tokens) as record:
        yield record


@contextmanager
def replay_routing(
    model: nn.Module,
    experts: Sequence[torch.Tensor],
    *,
    attention_mask: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> Iterator[RoutingRecord]:
    """Route each token of the forward passes inside the block as the engine did.

    Padding, and each sequence's last token, which the engine never ran, are routed as usual; so is
    all of a rank that has no sequence, no experts, and a mask of padding alone. With activation
    checkpointing, run ``backward`` inside the block too: it runs the routers again.

    Args:
        model: a transformers 5 MoE model, plain or FSDP2, or a module around one.
        experts: ``Rollout.routed_experts``, or those of a micro-batch's sequences: ``[S, L, K]``.
        attention_mask: ``[B, T]``, 0 at padding on either side; row b is sequence b. That of
            ``response_logprobs`` is ``rollout.sequence_mask_BL``.
        sequence_ids: instead of a mask, for packed sequences: an integer tensor in the shape of
            ``input_ids`` with each token's index into ``experts``, -1 for padding.
        position_ids: in the same shape, each token's position in its sequence; needed only if
            sequences are incomplete here. By default a sequence's tokens are in order.

    Yields:
        The routers' own choice in the last forward pass.

    Raises:
        ValueError: the model's routers cannot be replayed, or experts, tokens and model do not
            match; also after the block, if not all routers ran.
    """
    routers = _routers(model)
    _refuse_reentrant(model)
    tokens = TokenMap.of(attention_mask, sequence_ids, position_ids)
    if not experts and not (tokens.sequence_N != NOWHERE).any():
        with _hooks(routers, replace(tokens, sequences=0)) as record:
            yield record
        return
    if attention_mask is not None and len(attention_mask) != len(experts):
        raise ValueError(
            f"router replay: attention_mask has {len(attention_mask)} rows, and there are experts "
            f"of {len(experts)} sequences; pass the experts of this batch"
        )
    _check_experts(model, routers, experts)
    rows_N = tokens.rows([len(experts_SLK) for experts_SLK in experts])
    tokens = replace(tokens, sequences=len(experts))  # of which a batch may have some
    none_1LK = experts[0].new_zeros(1, *experts[0].shape[1:])
    # NOWHERE, -1, is the last row; a name would keep the copy of all experts during the block
    recorded = (rows_N != NOWHERE)[:, None], torch.cat([*experts, none_1LK])[rows_N]
    with _hooks(routers, tokens, recorded) as record:
        yield record


@contextmanager
def _hooks(
    routers: list[Any],
    tokens: TokenMap,
    recorded: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Iterator[RoutingRecord]:
    """Forward hooks on all routers, for the block.

    Args:
        recorded: bool [N, 1], and the engine's experts [N, L, K] of the tokens where it is True.
    """
    record = RoutingRecord(tokens, len(routers))
    unchecked = {0} if recorded is not None else set()

    def hook_of(layer: int) -> Any:
        def hook(router: Any, args: Any, output: Any) -> Any:
            nonlocal recorded
            if not isinstance(output, tuple) or len(output) != 3:
                raise _unsupported(router, "does not return logits, gates and experts")
            logits_NE, gates_NK, own_NK = output
            if len(logits_NE) != len(record.tokens.sequence_N):
                raise ValueError(
                    f"router replay: the forward pass has {len(logits_NE)} tokens, and "
                    f"{len(record.tokens.sequence_N)} were described; pass the mask or ids of the "
                    f"model's own batch"
                )
            record.note(layer, own_NK)
            if recorded is None:
                return output
            if layer in unchecked:  # one router, once: on a GPU this synchronizes
                unchecked.remove(layer)
                _check_gates(router, logits_NE, gates_NK, own_NK)
            known_N1, experts_NLK = recorded
            if known_N1.device != own_NK.device:  # once
                recorded = known_N1.to(own_NK.device), experts_NLK.to(own_NK.device)
                known_N1, experts_NLK = recorded
            chosen_NK = torch.where(known_N1, experts_NLK[:, layer].to(own_NK.dtype), own_NK)
            return logits_NE, _gates(router, logits_NE, chosen_NK).to(gates_NK.dtype), chosen_NK

        return hook

    handles = [router.register_forward_hook(hook_of(i)) for i, router in enumerate(routers)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
    record.check()


def _gates(router: Any, logits_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
    """softmax(logits) at the chosen experts, renormalized if the router does that."""
    dtype = torch.promote_types(logits_NE.dtype, torch.float32)
    gates_NK = logits_NE.softmax(-1, dtype=dtype).gather(-1, chosen_NK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's and later routers have no such option
        gates_NK = gates_NK / gates_NK.sum(-1, keepdim=True)
    return gates_NK


@torch.no_grad()
def _check_gates(
    router: Any, logits_NE: torch.Tensor, gates_NK: torch.Tensor, own_NK: torch.Tensor
) -> None:
    """Check that the router's gates are the softmax that is replayed here."""
    ours_NK = _gates(router, logits_NE, own_NK).to(gates_NK.dtype)
    if not torch.allclose(ours_NK, gates_NK, GATE_TOLERANCE, GATE_TOLERANCE, equal_nan=True):
        raise _unsupported(router, "has gates that are not a softmax over its experts")


def _unsupported(router: Any, reason: str) -> ValueError:
    return ValueError(
        f"router replay: {type(router).__name__} {reason}, so it cannot be replayed; the softmax "
        f"routers of transformers 5, such as those of Qwen3-MoE and Mixtral, are supported"
    )


def _routers(model: nn.Module) -> list[Any]:
    """The routers in layer order."""
    found: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if _is_router(module) and module not in inside:
            found.append(module)  # a wrapper of a router has its attributes, and its output
            inside.update(module.modules())
    if not found:
        raise _unsupported(model, "has no router of a known kind")
    return found


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        hasattr(module, "top_k")
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and len(weight) == getattr(module, "num_experts", None)
    )


def _check_experts(model: nn.Module, routers: list[Any], experts: Sequence[torch.Tensor]) -> None:
    if not experts:
        raise ValueError(
            "router replay: there are no experts; pass those of this batch's sequences"
        )
    top_k, count = routers[0].top_k, routers[0].num_experts
    for index, experts_SLK in enumerate(experts):
        if tuple(experts_SLK.shape[1:]) != (len(routers), top_k):
            raise ValueError(
                f"router replay: sequence {index} has experts of shape {list(experts_SLK.shape)}, "
                f"and {type(model).__name__} has {len(routers)} routers of {top_k} experts per "
                f"token; pass a rollout of the same model"
            )
        if (
            experts_SLK.numel()
            and not 0 <= int(experts_SLK.min()) <= int(experts_SLK.max()) < count
        ):
            raise ValueError(
                f"router replay: sequence {index} has expert {int(experts_SLK.max())} or a "
                f"negative one, and {type(model).__name__} has {count}; pass a rollout of the same "
                f"model"
            )


def _refuse_reentrant(model: nn.Module) -> None:
    """Refuse reentrant checkpointing, which does not notice a recomputation with other experts."""
    for module in model.modules():
        if module.training and getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("use_reentrant"):
                raise ValueError(
                    "router replay: the model checkpoints activations with use_reentrant=True, "
                    "which would not notice other experts when it recomputes a layer; enable it "
                    "with gradient_checkpointing_kwargs={'use_reentrant': False}"
                )
