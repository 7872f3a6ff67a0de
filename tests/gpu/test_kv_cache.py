"""Engines with an FP8 KV cache whose scales follow the policy, with CUDA graphs.

No attention backend is named: on Hopper the plugin chooses our decode, pages of 64 tokens and FA3
over values for prefill. ``test_kv_attention.py`` has the control, stock SGLang's frozen scales.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.ops.reference import FP8_MAX
from sgl_fp8rl.protocol.kv_schema import WORKSPACE_BYTES
from tests.engine.harness import EngineProcess, Server
from tests.engine.serving import version_of
from tests.gpu import engines
from tests.gpu.conftest import Record
from tests.gpu.engines import (
    FLAGS,
    PADDED,
    Answers,
    captured_sizes,
    decoded_sizes,
    digest_of,
    nbytes_of,
    together,
)
from tests.gpu.policies import DENSE, HEAD, Tensors, draw, shared_folder, write_checkpoint
from tests.gpu.test_memory_saver import TAGS, release, resume

pytestmark = pytest.mark.gpu

KV8 = {"kv_cache_dtype": "fp8_e4m3"}
INT8 = {"fp8rl_kv_cache": "int8"}
BF16_KV = {"attention_backend": "flashinfer"}
CHOSEN = {name: value for name, value in FLAGS.items() if name != "attention_backend"}
"""The flags of an engine whose backends are left to the plugin."""
CHOSEN["max_total_tokens"] = 8192
SHARPER = 2.0
"""Times q and k after their norms, so that attention weighs more than it does over random ones."""
PROMPTS, PROMPT, LENGTH = 8, 32, 200
TOKENS = slice(90, 200)
"""Of a sequence: those whose logprobs of decode and of prefill are compared."""
FACTOR = 2.0
"""How much further decode may be from prefill than with BF16 KV: each rounds in its own order.
Healthy, when both multiplied in FP8: 1.4 (0.173 / 0.122 nats); the control 31 (3.81)."""
TOO_SMALL = 16.0
"""Scales that fit the largest K and V, divided by this, clip a part of all."""
STEPS = 20
SIZES = [1, 3, 16]
FRACTION = 0.88
CAPACITY = 0.99
"""Of the tokens that fit beside the weights into the static memory."""


start_server = partial(engines.start_server, common=CHOSEN)
"""As ``engines.start_server``, but no attention backend is named unless a flag does."""


def start_engine(log: Path, checkpoint: Path, scales: torch.Tensor, path: Path) -> EngineProcess:
    """A fresh engine that starts with these scales, from a file at ``path``."""
    path.write_text(json.dumps({"scales": scales.tolist()}))
    return EngineProcess(log, checkpoint, **(CHOSEN | KV8), fp8rl_kv_scales=str(path))


def sharp(policy: Tensors) -> Tensors:
    """The policy with larger q and k."""
    norms = ("q_norm.weight", "k_norm.weight")
    return {n: t * SHARPER if n.endswith(norms) else t for n, t in policy.items()}


def scales_of(seed: int) -> torch.Tensor:
    """Random scales under which K and V of these policies fit, and no two layers are alike."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.rand(DENSE.layers, 2, DENSE.kv_heads, generator=random)
    return torch.exp2(drawn * 3 - 5)  # 1/32 to 1/4: up to 14 and more


def kept(scales: torch.Tensor) -> torch.Tensor:
    """What an engine with one scale a layer makes of them: the largest head's."""
    return scales.amax(-1, keepdim=True).expand_as(scales)


def update(server: Server, tensors: Tensors, scales: torch.Tensor | None) -> None:
    """Bring the server to these weights and scales as its next version."""
    version = version_of(server) + 1
    result = trainer_bridge.update(tensors, server, version=version, kv_scales=scales)
    assert result.version == version


def assert_in_force(server: Server, scales: torch.Tensor) -> None:
    told = server.control({"op": "kv"})
    assert not told["pending"]
    assert torch.equal(torch.tensor(told["scales"]), kept(scales))


@dataclass(frozen=True)
class World:
    """A server with policy 0, and what it answers under two sets of scales."""

    server: Server
    policy: Tensors
    checkpoint: Path
    sizes: list[int]
    before: Answers
    after: Answers
    fresh: Answers
    """Of an engine that was started with the second set."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logs = tmp_path_factory.mktemp("kv")
    policy = sharp(draw(DENSE, 0))
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, policy, folder / "0")
        with together(
            lambda: start_server(logs / "server.log", checkpoint, **KV8),
            lambda: start_engine(logs / "fresh.log", checkpoint, scales_of(2), logs / "kv.json"),
        ) as (server, fresh):
            sizes = [*captured_sizes(server.log), *PADDED]
            answers = []
            for seed in (1, 2):
                update(server, policy, scales_of(seed))
                assert_in_force(server, scales_of(seed))
                answers.append(Answers.of(server, sizes))
            before, after = answers
            fresh_answers = Answers.of(fresh, sizes)
            yield World(server, policy, checkpoint, sizes, before, after, fresh_answers)


def test_the_plugin_chose_backends_and_said_why(world: World) -> None:
    log = world.server.log.read_text(errors="replace")
    assert "8-bit KV cache: decode by trtllm_mha: our kernel multiplies in 16 bits" in log
    assert "8-bit KV cache: prefill by fa3: it attends in 16 bits" in log
    assert "pages of 64 tokens" in log


def test_decode_follows_an_update_of_scales(world: World) -> None:
    """At every captured batch size and at padded ones, as an engine started with them."""
    assert len(world.sizes) >= 5 + len(PADDED)
    for size in world.sizes:
        assert world.after.logprobs[size] == world.fresh.logprobs[size], f"batch of {size}"
        rows = zip(world.before.logprobs[size], world.after.logprobs[size], strict=True)
        assert all(old != new for old, new in rows), f"batch of {size}"


def test_every_batch_ran_in_a_cuda_graph(world: World) -> None:
    assert {(size, True) for size in world.sizes} <= decoded_sizes(world.server.log)


Rows = list[list[float]]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def sample(engine: EngineProcess | Server) -> tuple[list[list[int]], Rows]:
    """Whole sequences, and decode's logprobs of their ``TOKENS``."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(4096, (PROMPTS, PROMPT), generator=random).tolist()
    replies = engine.generate(
        {
            "input_ids": prompts,
            "sampling_params": {**GREEDY, "max_new_tokens": LENGTH - PROMPT},
            "return_logprob": True,
        }
    )
    sampled = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
    whole = [p + [token[1] for token in s] for p, s in zip(prompts, sampled, strict=True)]
    assert {len(sequence) for sequence in whole} == {LENGTH}
    first, last = TOKENS.start - PROMPT, TOKENS.stop - PROMPT
    return whole, [[token[0] for token in s[first:last]] for s in sampled]


def score(engine: EngineProcess | Server, sequences: list[list[int]]) -> Rows:
    """Prefill's logprobs of ``TOKENS``; without a prefix cache (FLAGS) all of it is computed."""
    replies = engine.generate(
        {
            "input_ids": sequences,
            "sampling_params": {**GREEDY, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )
    rows = [reply["meta_info"]["input_token_logprobs"] for reply in replies]
    assert {len(row) for row in rows} == {LENGTH}
    return [[token[0] for token in row[TOKENS]] for row in rows]


def distance(some: Rows, others: Rows) -> float:
    """Mean |difference|."""
    mean = fmean(
        abs(a - b)
        for row, other in zip(some, others, strict=True)
        for a, b in zip(row, other, strict=True)
    )
    assert math.isfinite(mean)
    return mean


def test_decode_is_as_near_to_prefill_as_its_kernel_allows(
    world: World, tmp_path: Path, record_property: Record
) -> None:
    """Also where scales are so small that K and V are clipped: both read the same codes."""
    server = world.server
    update(server, world.policy, None)
    whole, decode = sample(server)
    calibrated = distance(decode, score(server, whole))
    told = server.control({"op": "kv"})
    assert not told["pending"]
    scales = torch.tensor(told["scales"])
    for row, side in enumerate("kv"):
        amax_L = torch.tensor([layer[f"amax_{side}"] for layer in told["statistics"]])
        scales[:, row] = (amax_L / FP8_MAX / TOO_SMALL)[:, None]
    update(server, world.policy, scales)
    whole, decode = sample(server)
    clipped = distance(decode, score(server, whole))
    assert all(layer["clipped_k"] > 0 for layer in server.control({"op": "kv"})["statistics"])
    with start_server(tmp_path / "bf16.log", world.checkpoint, **BF16_KV) as other:
        # what a prefill would be off by that attends to K and V as they were before their store
        control = distance(decode, score(other, whole))
        whole, decode = sample(other)
        bf16 = distance(decode, score(other, whole))
        with start_server(tmp_path / "int8.log", world.checkpoint, **INT8) as third:
            update(third, world.policy, None)
            whole, decode = sample(third)
            int8 = distance(decode, score(third, whole))
            # its codes lose a part of what E4M3's do
            lost_int8 = distance(score(third, whole), score(other, whole))
            update(server, world.policy, None)
            lost_e4m3 = distance(score(server, whole), score(other, whole))
    found = {
        "bf16": bf16,
        "int8": int8,
        "lost": (lost_int8, lost_e4m3),
        "calibrated": calibrated,
        "clipped": clipped,
        "control": control,
    }
    record_property("decode to prefill", found)
    assert bf16 > 0
    assert calibrated <= FACTOR * bf16, found
    assert int8 <= FACTOR * bf16, found
    assert lost_int8 < lost_e4m3, found
    assert clipped <= FACTOR * bf16, found
    assert control > FACTOR * bf16, found


@pytest.mark.parametrize("kv", [KV8, INT8], ids=["e4m3", "int8"])
def test_steps_with_the_memory_saver(tmp_path: Path, kv: dict[str, str]) -> None:
    """Weights and scales change at each step, and all memory is released and resumed before."""
    scaled = kv is KV8  # codes of INT8 carry their own scales
    with shared_folder() as folder:
        last = draw(DENSE, STEPS)
        checkpoints = [
            write_checkpoint(DENSE, policy, folder / str(n))
            for n, policy in enumerate((draw(DENSE, 0), last))
        ]
        with start_server(
            tmp_path / "server.log",
            checkpoints[0],
            # without it SGLang 0.5.17 keeps the graphs' memory under its own tag in place
            {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"},
            enable_memory_saver=True,
            **kv,
        ) as server:
            seen: list[Answers] = []
            for step in range(1, STEPS + 1):
                release(server, *TAGS)
                resume(server, *TAGS)
                update(server, draw(DENSE, step), scales_of(step) if scaled else None)
                seen.append(Answers.of(server, SIZES))
                rows = [row for size in SIZES for row in seen[-1].logprobs[size]]
                assert all(math.isfinite(logprob) for row in rows for logprob in row)
                assert all(before.logprobs != seen[-1].logprobs for before in seen[:-1])
                if scaled:
                    assert_in_force(server, scales_of(step))
                    counted = server.control({"op": "kv"})["statistics"]
                    assert all(layer["tokens"] > 0 for layer in counted)
        path = tmp_path / "kv.json"
        with (
            start_engine(tmp_path / "fresh.log", checkpoints[1], scales_of(STEPS), path)
            if scaled
            else EngineProcess(tmp_path / "fresh.log", checkpoints[1], **(CHOSEN | kv))
        ) as fresh:
            assert Answers.of(fresh, SIZES).logprobs == seen[-1].logprobs


@pytest.mark.alone
def test_the_cache_takes_all_static_memory(tmp_path: Path, record_property: Record) -> None:
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, draw(DENSE, 0), folder / "0")
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        with start_server(
            tmp_path / "server.log",
            checkpoint,
            mem_fraction_static=FRACTION,
            max_total_tokens=10**9,  # more than there is room for
            **KV8,
        ) as server:
            status, info = server.ask("/server_info")
            assert status == 200
            weights = nbytes_of(digest_of(server))
    tokens = info["max_total_num_tokens"]
    token_bytes = DENSE.layers * 2 * DENSE.kv_heads * HEAD
    share = tokens * token_bytes / (FRACTION * free - weights - WORKSPACE_BYTES)
    record_property("share of static memory", share)
    assert share >= CAPACITY
