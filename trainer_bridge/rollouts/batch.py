"""Sampled sequences with their logprobs and versions, as lists of rows and as padded tensors.

Shapes: B sequences (prompts times n), T tokens of the longest response.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import add
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sgl_fp8rl.protocol.values import whole
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.kv.fp8_attention import KVScales
from trainer_bridge.ranks.group import Local, most_of
from trainer_bridge.rollouts.rows import Rows, indices_of

COMPLETE = ("stop", "length")
"""Finish reasons of a response that the engine ended as it was asked to."""
PAD_VERSION = -2  # padding of versions_BT: -1 is the checkpoint, updates count from 0


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences, one list entry each; the n samples of a prompt are adjacent.

    ``rollout[rows]`` has those rows alone (a slice, a mask, or indices), and everything that
    belongs to them.
    """

    prompt_tokens: list[list[int]]
    """Token ids of each prompt; none for a string whose request failed."""
    tokens: list[list[int]]
    """Sampled token ids, without the prompt."""
    logprobs: list[list[float]]
    """Natural log of each token's sampling probability (greedy: of its softmax probability)."""
    versions: list[list[int]]
    """Policy version that sampled each token, a number within its run; -1 is the checkpoint that
    the engine started from."""
    finish_reasons: list[str]
    """"stop", "length" (it has ``max_new_tokens``), "abort" (cut short, for instance by an update;
    its tokens are kept), or "error" (the request failed, or its reply is not to be trained on: no
    tokens)."""
    temperature: float
    """The trainer divides its logits by this before log_softmax (1.0 for greedy sampling)."""
    routed_experts: list[torch.Tensor] | None = None
    """If requested: the MoE experts of each token of prompt and response except the last, uint8 or
    int16 [tokens - 1, layers, experts per token] (``trainer_bridge.rollouts.routed_experts``)."""
    runs: list[list[str]] = field(default_factory=list)
    """The run of each token's version, as ``update`` named it; empty for the checkpoint."""
    errors: dict[int, EngineError] = field(default_factory=dict)
    """Why requests failed, by the index of the sequence."""
    groups: list[int] = field(default_factory=list)
    """Which prompt each sequence answers: the same number for the n samples of one."""
    texts: list[str] | None = None
    """The responses as the engine's tokenizer decodes them, "" of a request that failed; None of an
    engine without one."""
    kv_clipped: float | None = None
    """The largest share of a layer's K or V that an engine's FP8 KV cache clipped under the scales
    it has now, asked for after the last reply; None where no cache is FP8."""
    kv_scales: list[KVScales | None] | None = None
    """Those scales, of each sequence's engine, for ``response_logprobs``; None where it could not
    say, or its cache is not E4M3. Tokens before an update were stored under others: that changes
    values only where these clip, or where scales are not powers of two."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Rows) -> "Rollout":
        kept = indices_of("rollout", rows, len(self))
        lists = {name: [values[row] for row in kept] for name, values in self._lists().items()}
        errors = {new: self.errors[row] for new, row in enumerate(kept) if row in self.errors}
        return replace(self, **lists, errors=errors)  # type: ignore[arg-type]

    @staticmethod
    def join(rollouts: Iterable["Rollout"]) -> "Rollout":
        """The sequences of several rollouts, in their order; their groups stay apart.

        Raises:
            ValueError: there are none, temperatures differ, or only some have a field.
        """
        parts = list(rollouts)
        filled = [part for part in parts if len(part)] or parts[:1]
        kinds = {(part.temperature, *part._lists()) for part in filled}
        if len(kinds) != 1:
            raise ValueError(
                f"join: {len(parts)} rollouts are of {len(kinds)} kinds, by temperature and by "
                f"what they have ({kinds}); join one or more that were sampled alike"
            )
        lists: dict[str, list[Any]] = defaultdict(list)
        errors: dict[int, EngineError] = {}
        for part in filled:
            begin, next_group = len(lists["tokens"]), max(lists["groups"], default=-1) + 1
            for name, values in part._lists().items():
                lists[name] += values
            lists["groups"][begin:] = [next_group + group for group in part.groups]
            errors |= {begin + row: error for row, error in part.errors.items()}
        clipped = [part.kv_clipped for part in filled if part.kv_clipped is not None]
        most = max(clipped, default=None)
        return replace(filled[0], **lists, errors=errors, kv_clipped=most)  # type: ignore[arg-type]

    def micro_batches(
        self, tokens: int, *, group: dist.ProcessGroup | Local | None = None
    ) -> list[list[int]]:
        """Rows of micro-batches, each row in one, the longest first, so that little is padding.

        Every rank gets the same number of them, as the collectives of FSDP need it: some may be
        empty, and ``response_logprobs`` runs its forward pass for them too.

        Args:
            tokens: at most so many in a micro-batch: its rows times its longest prompt with
                response. A longer row is alone.
            group: the ranks that train together, of which each must call; as for ``correct``.

        Raises:
            ValueError: tokens is not positive.
        """
        tokens = whole("micro_batches: tokens", tokens, least=1)
        found = micro_batches_of(self._lengths(), tokens)
        needed = most_of(len(found), group)
        while len(found) < needed:
            largest = max(found, key=len, default=[])
            half = (len(largest) + 1) // 2
            found.append(largest[half:])
            del largest[half:]
        return found

    def _lists(self) -> dict[str, list[Any]]:
        """The fields that have an entry for each sequence."""
        found = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in found if isinstance(value, list) and value}

    @cached_property
    def is_complete_B(self) -> torch.Tensor:
        """True where a response ended by itself or at ``max_new_tokens``, bool [B]. Leave the other
        rows, which failed or were cut short, out of baseline and loss. Whoever does not train on
        responses of ``max_new_tokens`` either finds them by their finish reason, "length"."""
        return torch.tensor(
            [reason in COMPLETE for reason in self.finish_reasons], dtype=torch.bool
        )

    @cached_property
    def tokens_BT(self) -> torch.Tensor:
        """Token ids, int64 [B, T], padded with 0."""
        return _pad(self.tokens, np.int64, 0)

    @cached_property
    def logprobs_BT(self) -> torch.Tensor:
        """Rollout logprobs, float32 [B, T], padded with 0."""
        return _pad(self.logprobs, np.float32, 0)

    @cached_property
    def versions_BT(self) -> torch.Tensor:
        """Policy versions, int64 [B, T], padded with PAD_VERSION."""
        return _pad(self.versions, np.int64, PAD_VERSION)

    @cached_property
    def mask_BT(self) -> torch.Tensor:
        """True where there is a token, bool [B, T]."""
        lengths_B = [len(row) for row in self.tokens]
        with torch.inference_mode(False):  # it is kept, and a gradient may need it
            columns_T = torch.arange(max(lengths_B, default=0))
            return columns_T < torch.tensor(lengths_B, dtype=torch.int64)[:, None]

    @property
    def sequence_mask_BL(self) -> torch.Tensor:
        """True where ``response_logprobs`` gives the model a token of prompt or response, bool
        [B, L]: for ``replay_routing``. Without sequences it is the row of padding [[False]]."""
        lengths_B1 = torch.tensor(self._lengths() or [0])[:, None]
        return torch.arange(max(int(lengths_B1.max()), 1)) < lengths_B1

    def _lengths(self) -> list[int]:
        """Tokens of each prompt with its response."""
        return list(map(add, map(len, self.prompt_tokens), map(len, self.tokens)))

    @property
    def policy_versions(self) -> list[int]:
        """All policy versions that sampled a token here, ascending."""
        return sorted(set().union(*self.versions))

    @property
    def mixed_version_sequences(self) -> list[int]:
        """Indices of the sequences that more than one policy version sampled."""
        return [index for index, row in enumerate(self.versions) if len(set(row)) > 1]


def micro_batches_of(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows of like length, the longest first, with at most so many padded tokens together."""
    found: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > tokens:
            found.append([])
        found[-1].append(row)
    return found


def _pad(rows: Sequence[Sequence[Any]], dtype: Any, value: int) -> torch.Tensor:
    """[B, T] of a NumPy dtype; NumPy reads lists four times as fast as torch."""
    padded_BT = np.full((len(rows), max(map(len, rows), default=0)), value, dtype)
    for index, row in enumerate(rows):
        padded_BT[index, : len(row)] = row
    with torch.inference_mode(False):  # as above
        return torch.from_numpy(padded_BT)
