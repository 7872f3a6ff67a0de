"""Experts read from SGLang's replies, all that is refused, and routers compared."""

import base64
from typing import Any

import pytest
import torch

from trainer_bridge.rollouts.routed_experts import ExpertLayout, routing_disagreement

LAYOUT = {"decoder_layers": 3, "layers": [1, 2], "experts": 4, "top_k": 2}
"""Layer 0 is dense."""


def sent(experts: torch.Tensor) -> dict[str, Any]:
    """``meta_info`` as SGLang makes it of int32 ``[tokens - 1, decoder layers, experts]``."""
    return {"routed_experts": base64.b64encode(experts.int().numpy().tobytes()).decode()}


def captured(tokens: int = 4) -> torch.Tensor:
    """Rows of all decoder layers; the dense one holds zeros, as SGLang leaves it."""
    first = torch.arange((tokens - 1) * 3).view(tokens - 1, 3) % 4
    experts = torch.stack([first, (first + 1) % 4], dim=-1)
    experts[:, 0] = 0
    return experts


def test_moe_layers_are_kept_row_by_row() -> None:
    read = ExpertLayout.of({"routed_experts": LAYOUT}).read(sent(captured()), 4, 0)
    assert read.dtype == torch.uint8
    assert read.tolist() == captured()[:, 1:].tolist()
    assert read.numel() == 3 * 2 * 2  # a byte each: tokens - 1, MoE layers, experts a token
    dense = ExpertLayout.of({"routed_experts": LAYOUT}).read(spoiled(-1, 0), 4, 0)
    assert dense.equal(read), "what lies in dense layers matters"


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_large_expert_ids_fit(experts: int, dtype: torch.dtype) -> None:
    rows = captured()
    rows[:, 1:, 1] = experts - 1
    layout = ExpertLayout.of({"routed_experts": {**LAYOUT, "experts": experts}})
    read = layout.read(sent(rows), 4, 0)
    assert read.dtype == dtype
    assert (read[..., 1] == experts - 1).all()


def spoiled(value: int, layer: int) -> dict[str, Any]:
    experts = captured()
    experts[1, layer] = value
    return sent(experts)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "routed experts"),
        ({"routed_experts": None}, "routed experts"),
        (sent(captured(5)), "96 bytes.* 3 tokens of 3 layers"),
        (sent(captured(3)), "48 bytes.* 3 tokens"),
        ({"routed_experts": ""}, "0 bytes.* 3 tokens"),
        ({"routed_experts": sent(captured())["routed_experts"][:-4]}, "69 bytes"),
        ({"routed_experts": sent(captured())["routed_experts"][:-3]}, "0 bytes"),
        (spoiled(-1, 2), "expert -1,.*0 to 3"),
        (spoiled(4, 1), "expert 4,.*0 to 3"),
        (spoiled(0, 1), "expert twice"),  # a row that was never written
    ],
)
def test_what_no_router_chose_is_refused(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"reply 7 .*{message}"):
        ExpertLayout.of({"routed_experts": LAYOUT}).read(meta, 4, 7)


def test_equal_experts_far_apart_in_a_row_are_found() -> None:
    layout = ExpertLayout.of({"routed_experts": {**LAYOUT, "top_k": 3}})
    rows = torch.tensor([0, 1, 2]).expand(3, 3, 3).clone()
    assert layout.read(sent(rows), 4, 0).shape == (3, 2, 3)
    rows[2, 2] = torch.tensor([3, 1, 3])
    with pytest.raises(ValueError, match=r"reply 0 .*expert twice"):
        layout.read(sent(rows), 4, 0)


def test_disagreement_counts_sets_by_token_and_layer() -> None:
    theirs = [torch.tensor([[[0, 1], [2, 3]], [[1, 2], [0, 3]]], dtype=torch.uint8)]
    ours = [torch.tensor([[[1, 0], [2, 1]], [[1, 2], [3, 0]], [[9, 9], [9, 9]]])]
    assert routing_disagreement(theirs, ours) == 1 / 4  # order and the last token do not count
    assert routing_disagreement(theirs * 3, [*ours * 2, theirs[0]]) == 2 / 12
    none = torch.zeros(0, 2, 2)
    assert routing_disagreement([*theirs, none, *theirs], [*ours, *ours, none]) == 1 / 4
    large = torch.tensor([[[200, 0]]])
    assert routing_disagreement([large.to(torch.uint8)], [large.flip(-1)]) == 0


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ([], "1 .*0 sequences"),
        ([torch.zeros(1, 2, 2)], r"sequence 0 .*\[2, 2, 2\].*\[1, 2, 2\]"),
        ([torch.zeros(2, 1, 2)], r"sequence 0 .*\[2, 2, 2\].*\[2, 1, 2\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(ours: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        routing_disagreement([torch.zeros(2, 2, 2)], ours)
    with pytest.raises(ValueError, match="response"):  # which has no token
        routing_disagreement([torch.zeros(0, 2, 2)], [torch.zeros(1, 2, 2)])
