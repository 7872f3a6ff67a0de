"""The experts that the engine routed each token to: read from its replies, checked, compared.

One tensor per sequence, ``experts_SLK``: row t holds the experts of the forward pass on token t of
the concatenated prompt and response. The last token was sampled but never fed back, so it has no
row: S = prompt + response - 1. Every pass that predicts a response token has one.

uint8 up to 256 experts, else int16: L * K or 2 * L * K bytes per token (Qwen3-30B-A3B: 384).

Shapes: S rows of a sequence, L MoE layers (without dense ones), K experts per token, in the
engine's order of descending gates.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from sgl_fp8rl.protocol.values import are_whole

_LARGEST_UINT8_EXPERTS = 256
_LARGEST_INT16_EXPERTS = 1 << 15


@dataclass(frozen=True)
class ExpertLayout:
    """How to read the engine's replies; SGLang sends plain int32 without a shape."""

    decoder_layers: int
    """All layers of the model, as SGLang sends them; dense ones hold zeros."""
    layers: list[int]
    """Indices of the L decoder layers with a router, ascending."""
    experts: int
    """Experts that each router chooses from, without shared ones."""
    top_k: int

    @classmethod
    def of(cls, status: dict[str, Any]) -> "ExpertLayout":
        """From the engine's answer to the control message ``status``.

        Raises:
            ValueError: the engine returns no experts.
        """
        found = status.get("routed_experts")
        if found is None:
            raise ValueError(
                "rollout: the engine returns no routed experts; start it with "
                "--enable-return-routed-experts (Engine(enable_return_routed_experts=True)) if "
                "its model has experts, or leave routed_experts out"
            )
        return cls(**found)

    @classmethod
    def is_sound(cls, found: Any) -> bool:
        """Whether a status's ``routed_experts`` can be read; None says that there are none."""
        if found is None:
            return True
        if not isinstance(found, dict) or found.keys() != {each.name for each in fields(cls)}:
            return False
        sizes = [found["decoder_layers"], found["experts"], found["top_k"]]
        return (
            are_whole(sizes, 1)
            and found["top_k"] <= found["experts"] <= _LARGEST_INT16_EXPERTS
            and are_whole(found["layers"], 0)
            and max(found["layers"], default=0) < found["decoder_layers"]
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.experts <= _LARGEST_UINT8_EXPERTS else torch.int16

    def read(self, meta: dict[str, Any], tokens: int, index: int) -> torch.Tensor:
        """The experts of one reply, ``[tokens - 1, L, K]``.

        Args:
            meta: the reply's ``meta_info``.
            tokens: number of prompt and response tokens; 0 for an empty response.
            index: index of the reply, for messages.

        Raises:
            ValueError: they are missing, have another shape, or are not a router's choice.
        """
        if tokens <= 1:  # no rows
            return torch.empty(0, len(self.layers), self.top_k, dtype=self.dtype)
        encoded = meta.get("routed_experts")
        if encoded is None:
            raise ValueError(
                f"rollout: reply {index} has no routed experts, though the engine captures them; "
                f"check that no proxy drops parts of meta_info"
            )
        try:
            sent = bytearray(base64.b64decode(encoded))
        except ValueError:
            sent = bytearray()  # truncated within a group of four characters, or not ASCII
        shape = (tokens - 1, self.decoder_layers, self.top_k)
        if len(sent) != math.prod(shape) * torch.int32.itemsize:
            raise ValueError(
                f"rollout: reply {index} has {len(sent)} bytes of int32 expert ids where "
                f"{shape[0]} tokens of {shape[1]} layers with {shape[2]} experts each were run; "
                f"do not replay it, and report it with the engine's version and options"
            )
        experts_SLK = torch.frombuffer(sent, dtype=torch.int32).view(shape)[:, self.layers]
        if fault := self._fault(experts_SLK):
            raise ValueError(
                f"rollout: reply {index} has {fault}, so its experts were not fully captured; "
                f"do not replay it, and report it with the engine's version and options"
            )
        return experts_SLK.to(self.dtype)

    def _fault(self, experts_SLK: torch.Tensor) -> str | None:
        """What no router would choose: unwritten rows hold zeros, padding holds -1."""
        if not experts_SLK.numel():
            return None
        least, most = (int(bound) for bound in experts_SLK.aminmax())
        if least < 0 or most >= self.experts:
            return f"expert {least if least < 0 else most}, not one of 0 to {self.experts - 1}"
        # transposed and in small integers: comparing long contiguous runs is much faster
        slots_KX = experts_SLK.to(self.dtype).flatten(0, 1).T.contiguous()
        for apart in range(1, self.top_k):
            if bool((slots_KX[apart:] == slots_KX[:-apart]).any()):
                return "the same expert twice for one token and layer"
        return None


def routing_disagreement(
    experts: Sequence[torch.Tensor], own_experts: Sequence[torch.Tensor]
) -> float:
    """Share of (token, layer) pairs for which two routers chose different sets of experts.

    Args:
        experts: one tensor ``[S, L, K]`` per sequence, as in ``Rollout.routed_experts``.
        own_experts: the trainer's choice at the same tokens (``RoutingRecord.experts``); rows
            beyond S, such as that of the last token, are ignored, and so are sequences without
            rows here or there: a request that failed, or one of another batch. The order of experts
            within a row does not matter.

    Returns:
        A number from 0 (same experts everywhere) to 1.

    Raises:
        ValueError: sequences, layers or experts per token differ, or there are no rows.
    """
    if len(experts) != len(own_experts):
        raise ValueError(
            f"routing_disagreement: {len(experts)} and {len(own_experts)} sequences; "
            f"pass both for the same sequences"
        )
    differing = pairs = 0
    for index, (theirs_SLK, ours_SLK) in enumerate(zip(experts, own_experts, strict=True)):
        if not len(theirs_SLK) or not len(ours_SLK):
            continue
        ours_SLK = ours_SLK[: len(theirs_SLK)]
        if theirs_SLK.shape != ours_SLK.shape:
            raise ValueError(
                f"routing_disagreement: sequence {index} is {list(theirs_SLK.shape)} and "
                f"{list(ours_SLK.shape)} (rows, layers, experts per token); pass both for the same "
                f"tokens and model"
            )
        a, b = (x.to(torch.int16).sort(-1).values for x in (theirs_SLK, ours_SLK.cpu()))
        differing += int((a != b).any(-1).sum())
        pairs += a.shape[0] * a.shape[1]
    if not pairs:
        raise ValueError("routing_disagreement: no tokens; pass a sequence with a response")
    return differing / pairs
