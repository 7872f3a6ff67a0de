"""replay_routing(): forward and gradient held against MoE blocks written down by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard

from tests.trainer_bridge.moe_models import (
    EXPERTS,
    FAMILIES,
    LAYERS,
    TOP_K,
    random_experts,
    random_tokens,
    tiny,
)
from tests.trainer_bridge.test_fsdp import run
from trainer_bridge import response_logprobs
from trainer_bridge.rollouts.batch import Rollout
from trainer_bridge.rollouts.routed_experts import routing_disagreement
from trainer_bridge.router_replay import record_routing, replay_routing
from trainer_bridge.router_replay.token_map import TokenMap

TOLERANCE = 1e-5  # of FP32 logits of about 3; healthy: 2e-6 (sums in another order)
SEEN = 0.1  # what other experts change at least; measured: 1 and more
LENGTHS = (7, 4, 9)


def ones(count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.long)


def forward(
    model: Any, ids_BT: torch.Tensor, experts: list[torch.Tensor], given: Any, **which: Any
) -> tuple[torch.Tensor, Any]:
    """Logits of a forward that replays, with what else the model is given; and the record."""
    with torch.no_grad(), replay_routing(model, experts, **which) as record:
        return model(ids_BT, **given).logits, record


def replayed(model: Any, tokens_S: torch.Tensor, experts_SLK: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence by itself."""
    mask = {"attention_mask": ones(len(tokens_S))}
    return forward(model, tokens_S[None], [experts_SLK], mask, **mask)[0][0]


def only(model: Any, experts_SLK: torch.Tensor) -> Callable[[Any, Any, Any], Any]:
    """A hook on MoE blocks that computes each token's experts one by one, with no router code."""

    def hook(block: Any, args: Any, output: Any) -> Any:
        layer = [m.mlp for m in model.model.layers].index(block)
        hidden_ND = args[0].reshape(-1, args[0].shape[-1])
        out_ND = torch.zeros_like(hidden_ND)
        for n, hidden_D in enumerate(hidden_ND):
            chosen = experts_SLK[n, layer].long()
            gates = torch.exp(block.gate.weight @ hidden_D)
            if getattr(block.gate, "norm_topk_prob", True):
                gates = gates[chosen] / gates[chosen].sum()
            else:
                gates = gates[chosen] / gates.sum()
            for gate, e in zip(gates, chosen, strict=True):
                g, u = (block.experts.gate_up_proj[e] @ hidden_D).chunk(2)
                down_D = block.experts.down_proj[e] @ (nn.functional.silu(g) * u)
                out_ND[n] += gate * down_D
        if hasattr(block, "shared_expert"):
            shared = torch.sigmoid(block.shared_expert_gate(hidden_ND))
            out_ND += shared * block.shared_expert(hidden_ND)
        return out_ND.view_as(args[0])

    return hook


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_recorded_experts(family: str) -> None:
    model = tiny(family)
    tokens_S, experts_SLK = random_tokens(8, 1), random_experts(8, 2)
    with torch.no_grad():
        stock = model(tokens_S[None]).logits[0]
        found = replayed(model, tokens_S, experts_SLK)
        hooks = [
            layer.mlp.register_forward_hook(only(model, experts_SLK))
            for layer in model.model.layers
        ]
        by_hand = model(tokens_S[None]).logits[0]
        for hook in hooks:
            hook.remove()
        assert torch.equal(model(tokens_S[None]).logits[0], stock), "the hooks outlived the block"
    assert (found - by_hand).abs().max() < TOLERANCE
    assert (found - stock).abs().max() > SEEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_choice_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    model, tokens_S, mask = tiny(family, dtype), random_tokens(9, 3), ones(9)
    with torch.no_grad():
        with record_routing(model, attention_mask=mask) as record:
            stock = model(tokens_S[None], attention_mask=mask).logits[0]
        (own_SLK,) = record.experts
        assert own_SLK.shape == (9, LAYERS, TOP_K)
        assert torch.equal(replayed(model, tokens_S, own_SLK[:-1]), stock)
        # the order of experts in a row is of no matter
        reordered = replayed(model, tokens_S, own_SLK.flip(-1)).float()
    tolerance = TOLERANCE if dtype == torch.float32 else 0.1  # BF16, healthy: 0.03
    assert (reordered - stock.float()).abs().max() < tolerance


def padded(
    tokens: list[torch.Tensor], left: bool
) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    width = max(len(row) for row in tokens) + 2
    ids_BT = torch.zeros(len(tokens), width, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    places = []
    for b, row in enumerate(tokens):
        start = width - len(row) if left else 0
        places.append(slice(start, start + len(row)))
        ids_BT[b, places[-1]], mask_BT[b, places[-1]] = row, 1
    return ids_BT, mask_BT, places


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_on_either_side(left: bool) -> None:
    model = tiny()
    tokens = [random_tokens(n, n) for n in LENGTHS]
    experts = [random_experts(n - 1, n) for n in LENGTHS]
    ids_BT, mask_BT, places = padded(tokens, left)
    given = {"attention_mask": mask_BT, "position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0)}
    logits_BT, record = forward(model, ids_BT, experts, given, attention_mask=mask_BT)
    for b, place in enumerate(places):
        alone = replayed(model, tokens[b], experts[b])
        assert (logits_BT[b, place] - alone).abs().max() < TOLERANCE
        wrong = replayed(model, tokens[b], experts[b].roll(1, 0))  # a position off
        assert (logits_BT[b, place] - wrong).abs().max() > SEEN
    assert [len(row) for row in record.experts] == list(LENGTHS)


def test_packed_sequences() -> None:
    model = tiny()
    tokens = [random_tokens(n, n) for n in LENGTHS]
    experts = [random_experts(n - 1, n) for n in LENGTHS]
    order = [2, 0, 1]  # sequences of a batch, packed in another order
    ids_1N = torch.cat([tokens[i] for i in order])[None]
    positions_1N = torch.cat([torch.arange(LENGTHS[i]) for i in order])[None]
    sequences_1N = torch.cat([torch.full((LENGTHS[i],), i) for i in order])[None]
    # without a KV cache transformers sees where sequences begin
    given = {"position_ids": positions_1N, "use_cache": False}
    for positions in (None, positions_1N):
        which = {"sequence_ids": sequences_1N, "position_ids": positions}
        logits_1N, record = forward(model, ids_1N, experts, given, **which)
        for i, found in zip(order, logits_1N[0].split([LENGTHS[i] for i in order]), strict=True):
            assert (found - replayed(model, tokens[i], experts[i])).abs().max() < TOLERANCE
        assert [len(row) for row in record.experts] == list(LENGTHS)
    # a micro-batch of them
    first_1T = tokens[0][None]
    _, record = forward(model, first_1T, experts, {}, sequence_ids=torch.zeros_like(first_1T))
    assert [len(row) for row in record.experts] == [LENGTHS[0], 0, 0]
    assert 0 < routing_disagreement(experts, record.experts) <= 1


def test_a_part_of_a_sequence_needs_its_positions() -> None:
    model, tokens_S, experts_SLK = tiny(), random_tokens(9, 5), random_experts(8, 6)
    part, which = (
        (tokens_S[None, :5], [experts_SLK], {}),
        {"sequence_ids": torch.zeros(1, 5).long()},
    )
    with pytest.raises(ValueError, match=r"sequence 0 has 5 .* 8; .*position_ids"):
        forward(model, *part, **which)
    logits, _ = forward(model, *part, **which, position_ids=torch.arange(5)[None])
    assert (logits[0] - replayed(model, tokens_S, experts_SLK)[:5]).abs().max() < TOLERANCE


def test_tokens_without_experts_are_routed_as_ever() -> None:
    """The last token of each sequence, and sequences whose response has no token."""
    model, tokens_S, mask = tiny(), random_tokens(6, 7), ones(6)
    with torch.no_grad(), record_routing(model, attention_mask=mask) as record:
        stock = model(tokens_S[None], attention_mask=mask).logits[0]
    (own_SLK,) = record.experts
    other_SLK = (own_SLK + 1) % EXPERTS
    assert torch.equal(replayed(model, tokens_S, own_SLK[:0]), stock)
    # all but the first row's choice is its own: what comes after is not, through attention
    mixed = replayed(model, tokens_S, torch.cat([own_SLK[:4], other_SLK[4:5]]))
    assert (mixed[:4] - stock[:4]).abs().max() < TOLERANCE
    assert (mixed[4] - stock[4]).abs().max() > SEEN


def test_no_token_is_of_no_sequence() -> None:
    for shape in ((2, 0), (0, 5)):
        tokens = TokenMap.of(torch.ones(shape), None, None)
        assert tokens.rows([0] * shape[0]).numel() == 0


def loss_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    logprobs = model(ids, attention_mask=mask).logits.log_softmax(-1)
    return logprobs[:, :-1].gather(-1, ids[:, 1:, None]).sum()  # type: ignore[no-any-return]


def in_double(family: str) -> Any:
    """transformers' norms, eager attention and grouped products stay in FP32 or refuse FP64."""
    model = tiny(family, torch.float64, attn_implementation="sdpa", experts_implementation="eager")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if "RMSNorm" in type(child).__name__:
                norm = nn.RMSNorm(child.weight.shape, eps=1e-6, dtype=torch.float64)
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_the_routers_gradient_is_that_of_the_replayed_forward(family: str) -> None:
    """FP64: autograd against central differences of the loss in the routers' weights."""
    model, ids, mask = in_double(family), random_tokens(6, 8)[None], ones(6)
    experts = [random_experts(5, 9)]
    step = 1e-5
    for layer in range(LAYERS):
        weight = model.model.layers[layer].mlp.gate.weight
        with replay_routing(model, experts, attention_mask=mask):
            (found,) = torch.autograd.grad(loss_of(model, ids, mask), weight)
            numeric = torch.zeros_like(weight)
            with torch.no_grad():
                for e in range(EXPERTS):
                    for d in (0, 7, 31):
                        values = []
                        for sign in (1, -1):
                            weight[e, d] += sign * step
                            values.append(loss_of(model, ids, mask))
                            weight[e, d] -= sign * step
                        numeric[e, d] = (values[0] - values[1]) / (2 * step)
        (stock,) = torch.autograd.grad(loss_of(model, ids, mask), weight)
        columns = [0, 7, 31]
        error = (found - numeric)[:, columns].abs().max() / numeric.abs().max()
        assert error < 1e-6  # healthy: 3e-8, of the differences
        # control: the gradient without replay is off by 1.4 times its largest and more
        assert (stock - numeric)[:, columns].abs().max() / numeric.abs().max() > 0.5
        assert found.abs().max() > 0.005


def gradients(model: Any, experts: list[torch.Tensor], ids: torch.Tensor) -> dict[str, Any]:
    model.zero_grad()
    mask = torch.ones_like(ids)
    with replay_routing(model, experts, attention_mask=mask):
        loss_of(model, ids, mask).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_recomputed_activations_take_the_same_experts() -> None:
    model, ids = tiny().train(), random_tokens(8, 10)[None]
    experts = [random_experts(7, 11)]
    wanted = gradients(model, experts, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model, experts, ids)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    # outside of the block the recomputation is another one, and torch notices
    mask = torch.ones_like(ids)
    with replay_routing(model, experts, attention_mask=mask):
        loss = loss_of(model, ids, mask)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()


def sharded_replay(rank: int, folder: Path) -> None:
    """Each rank replays a sequence, with recomputation; gradients are those of one process."""
    ids = [random_tokens(8, 20 + r)[None] for r in range(2)]
    experts = [[random_experts(7, 30 + r)] for r in range(2)]
    plain = tiny().train()
    alone = [gradients(plain, experts[r], ids[r]) for r in range(2)]

    model = tiny().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fully_shard(model.model.layers[0].mlp.gate)  # a router by itself, and one within its layer
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = gradients(model, experts[rank], ids[rank])
    assert found
    for name, gradient in found.items():
        wanted = (alone[0][name] + alone[1][name]) / 2
        error = (gradient.full_tensor() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, (name, float(error))  # healthy: 1e-6
    swapped = gradients(model, experts[1 - rank], ids[rank])
    name = "model.layers.0.mlp.gate.weight"
    assert (swapped[name].full_tensor() - found[name].full_tensor()).abs().max() > 1e-3


def sampled(*lengths: int) -> Rollout:
    """A rollout with experts, two tokens of each sequence its prompt; one of length 0 failed."""
    rows = [random_tokens(n, 40 + n).tolist() for n in lengths]
    return Rollout(
        prompt_tokens=[row[:2] for row in rows],
        tokens=[row[2:] for row in rows],
        logprobs=[[-1.0] * len(row[2:]) for row in rows],
        versions=[[0] * len(row[2:]) for row in rows],
        finish_reasons=["stop" if row else "error" for row in rows],
        temperature=1.0,
        routed_experts=[random_experts(max(n - 1, 0), 50 + n) for n in lengths],
    )


def block_of(model: Any, rollout: Rollout) -> Any:
    experts = rollout.routed_experts or []
    return replay_routing(model, experts, attention_mask=rollout.sequence_mask_BL)


def one_rank_without_rows(rank: int, folder: Path) -> None:
    """FSDP2's collectives go on, and the gradient is that of the other rank's sequences."""
    rollout, plain = sampled(7, 5), tiny().train()
    with block_of(plain, rollout):
        response_logprobs(plain, rollout).sum().backward()
    model = tiny().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    mine = rollout if rank == 0 else rollout[[]]
    with block_of(model, mine) as record:
        response_logprobs(model, mine).sum().backward()
    assert [len(each) for each in record.experts] == [7, 5][: len(mine)]
    for name, parameter in model.named_parameters():
        wanted = plain.get_parameter(name).grad / 2
        error = (parameter.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, (name, float(error))
    with torch.no_grad():
        found_BT = response_logprobs(model, mine, micro_batch_tokens=7, replay=True)
        expected_BT = response_logprobs(plain, rollout, replay=True)
    assert rank or (found_BT - expected_BT).abs().max() < TOLERANCE


@pytest.mark.timeout(180)
@pytest.mark.parametrize("worker", [sharded_replay, one_rank_without_rows])
def test_fsdp2_replays_as_one_process_does(worker: Any, tmp_path: Path) -> None:
    run(worker, tmp_path)


@torch.no_grad()
def test_logprobs_of_a_rollout_with_its_experts() -> None:
    """Each row against its sequence alone; and whole, by micro-batches, and of no row."""
    model, rollout = tiny(), sampled(7, 0, 4, 9)
    found_BT = response_logprobs(model, rollout, replay=True)
    for b in (0, 2, 3):
        assert rollout.routed_experts
        tokens_S = torch.tensor(rollout.prompt_tokens[b] + rollout.tokens[b])
        logits_SV = replayed(model, tokens_S, rollout.routed_experts[b])
        wanted_T = logits_SV.log_softmax(-1)[:-1].gather(1, tokens_S[1:, None])[1:, 0]
        assert (found_BT[b, : len(wanted_T)] - wanted_T).abs().max() < TOLERANCE
    assert (response_logprobs(model, rollout) - found_BT).abs().max() > SEEN
    parts_BT = response_logprobs(model, rollout, micro_batch_tokens=9, replay=True)
    assert (parts_BT - found_BT).abs().max() < TOLERANCE
    assert response_logprobs(model, rollout[[]], replay=True).shape == (0, 0)


def test_what_cannot_be_replayed_in_logprobs_is_refused() -> None:
    model, rollout = tiny().train(), sampled(7, 4)
    for given in ((replace(rollout, routed_experts=None),), ([[1]], [[2]])):
        with pytest.raises(ValueError, match="routed_experts=True"):
            response_logprobs(model, *given, replay=True)
    response_logprobs(model, rollout, replay=True).sum().backward()
    wanted = model.model.layers[0].mlp.gate.weight.grad
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="inside of replay_routing"):
        response_logprobs(model, rollout, replay=True)
    model.zero_grad()
    with block_of(model, rollout):
        response_logprobs(model, rollout).sum().backward()
    assert torch.equal(model.model.layers[0].mlp.gate.weight.grad, wanted)


@pytest.mark.parametrize("impl", CheckpointImpl)
def test_replay_in_logprobs_refuses_a_checkpoint_around_a_layer(impl: CheckpointImpl) -> None:
    """The gradient of a reentrant one would be of other experts, without an error."""
    model, rollout = tiny().train(), sampled(7, 4)
    wanted_BT = response_logprobs(model, rollout, replay=True)
    layers = model.model.layers
    layers[0] = checkpoint_wrapper(layers[0], checkpoint_impl=impl)
    with pytest.raises(ValueError, match="inside of replay_routing"):
        response_logprobs(model, rollout, replay=True)
    with torch.no_grad():
        assert torch.equal(response_logprobs(model, rollout, replay=True), wanted_BT)


def test_the_hooks_are_gone_after_an_error() -> None:
    model, ids = tiny(), random_tokens(5, 0)[None]
    with pytest.raises(ZeroDivisionError), replay_routing(model, ONE, attention_mask=ones(5)):
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())
    model(ids)


ONE = [random_experts(4, 0)]
MASK, IDS = {"attention_mask": ones(5)}, {"sequence_ids": ones(5) - 1}


@pytest.mark.parametrize(
    ("experts", "which", "message"),
    [
        (ONE, {}, "attention_mask .* or sequence_ids"),
        (ONE, MASK | IDS, "attention_mask .* or sequence_ids"),
        (ONE, {"attention_mask": ones(5)[0]}, "has 1 dimensions"),
        (ONE * 2, MASK, "has 1 rows, .* 2 sequences"),
        ([], {"sequence_ids": ones(5)}, "no experts"),
        (ONE, {"sequence_ids": ones(5)}, "sequence 1.* of 1"),
        ([random_experts(3, 0)], MASK, "sequence 0 .* 5 tokens.* 3"),
        ([random_experts(6, 0)], MASK, "sequence 0 .* 5 tokens.* 6"),
        ([random_experts(5, 0)], {"attention_mask": ones(6)}, "5 tokens.* 6"),
        (ONE, IDS | {"position_ids": ones(4)}, "4 position_ids.* 5 tokens"),
        (ONE, IDS | {"position_ids": -ones(5)}, "sequence 0 .*5 tokens"),
        ([ONE[0][:, :1]], MASK, r"2 routers of 2 experts"),
        ([ONE[0][..., :1]], MASK, r"2 routers of 2 experts"),
        ([ONE[0] + EXPERTS], MASK, "has expert .* has 6"),
    ],
)
def test_what_does_not_fit_is_refused(
    experts: list[torch.Tensor], which: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        forward(tiny(), random_tokens(5, 0)[None], experts, {}, **which)


def test_a_forward_pass_that_went_around_the_routers_is_noticed() -> None:
    with pytest.raises(ValueError, match="0 of 2 routers"), replay_routing(tiny(), ONE, **MASK):
        pass


class SigmoidRouter(nn.Module):
    """As DeepSeek's and MiniMax's: the same interface, other gates."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = TOP_K, EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, 32))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, 32) @ self.weight.T
        gates, experts = logits.sigmoid().topk(TOP_K)
        return logits, gates / gates.sum(-1, keepdim=True), experts


class PlainRouter(SigmoidRouter):
    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden)[0]


def reentrant() -> Any:
    """A model whose checkpointing would not notice where its routers choose anew."""
    model = tiny().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def routed_by(router: type[nn.Module]) -> Any:
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.gate = router()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: routed_by(SigmoidRouter), "SigmoidRouter.*softmax"),
        (lambda: routed_by(PlainRouter), "PlainRouter.*logits, gates"),
        (lambda: tiny("qwen3"), "Qwen3ForCausalLM.*router"),
        (reentrant, "'use_reentrant': False"),
    ],
)
def test_other_models_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(make(), random_tokens(5, 0)[None], ONE, {}, **MASK)
