"""Weights into a stock engine, over SGLang's own fastest colocated path."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.engines.weights import Named

BUCKET_BYTES = 512 << 20
IDLE_S = 30.0
POLL_S = 0.02
PROBE = list(range(1000, 1064))
"""A prompt whose own logprobs show that weights arrived."""
NEW_TOKENS = 4


def buckets(named: Named, bucket_bytes: int) -> Iterator[tuple[Named, bool]]:
    """Tensors in order, at least ``bucket_bytes`` at a time, and whether they are the last."""
    bucket: Named = []
    for index, pair in enumerate(named):
        bucket.append(pair)
        last = index == len(named) - 1
        if last or sum_bytes(bucket) >= bucket_bytes:
            yield bucket, last
            bucket = []


def sum_bytes(named: Named) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for _, tensor in named)


@contextmanager
def session(engine: Any) -> Iterator[None]:
    """What SGLang 0.5.23 takes weights in, and processes them at the end of; 0.5.17 has none."""
    if not hasattr(engine, "begin_weight_update"):
        yield
        return
    _assert_done("to begin an update", *engine.begin_weight_update())
    yield
    _assert_done("to end an update", *engine.end_weight_update())


def _assert_done(what: str, done: bool, message: str) -> None:
    if not done:
        raise RuntimeError(f"the engine refused {what}: {message}")


def send(engine: Any, named: Named, last: bool, update: str, ranks: int = 1) -> None:
    """Send one flattened bucket to each rank of an engine, in a ``session``; see
    ``send_payloads``."""
    send_payloads(engine, [payload(named) for _ in range(ranks)], last, update)


def payload(named: Named) -> str:
    """One flattened bucket as an engine's rank opens it, over CUDA IPC."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=named)
    content = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    serialized: str = MultiprocessingSerializer.serialize(content, output_str=True)
    return serialized


def send_payloads(engine: Any, payloads: list[str], last: bool, update: str) -> None:
    """Let an engine load one bucket, of which each rank has a payload; flush the prefix cache after
    the ``last``. ``update``: what an error calls it."""
    _assert_done(
        update,
        *engine.update_weights_from_tensor(
            payloads, load_format="flattened_bucket", flush_cache=last
        ),
    )


def push(engine: Any, named: Named, ranks: int = 1) -> None:
    """Replace the dummy weights of a stock engine, and check that each group of them is in force.

    Of SGLang's dummy FP8 codes 98% are zero: it draws from +-1e-3, and up to half of E4M3's least
    value, 2**-9, rounds to zero. Arithmetic on zeros takes less power, so the GPU runs faster than
    with any model. Each group is sent by itself and must change what the engine computes.
    """
    before, _ = probe(engine)
    for group, tensors in weight_groups(named).items():
        with session(engine):
            for bucket, _ in buckets(tensors, BUCKET_BYTES):
                send(engine, bucket, False, f"the weights of {group}", ranks)
        flush(engine)
        after, _ = probe(engine)
        if not all(map(math.isfinite, after)):
            raise RuntimeError(f"logprobs are not finite with random weights in {group}")
        if after == before:
            raise RuntimeError(
                f"random weights in {group} changed no logprob: the engine still holds its dummy "
                f"weights there, and its times would be too short"
            )
        before = after


def flush(engine: Any) -> None:
    """Empty the prefix cache. The scheduler refuses as long as it has not put away its last batch,
    whose replies it sent before; an update that flushes would then end it."""
    deadline = time.monotonic() + IDLE_S
    while not engine.flush_cache().success:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine is not idle {IDLE_S:.0f} s after its last reply")
        time.sleep(POLL_S)


def weight_groups(named: Named) -> dict[str, Named]:
    """The matrices (or codes) of attention and of the MLP, and before them all other tensors.

    Scales are among the others, so that nothing but the codes makes the difference of a group.
    """
    found: dict[str, Named] = {"all but the linears": [], "attention": [], "the MLP": []}
    for name, tensor in named:
        group = "all but the linears"
        if name.endswith("_proj.weight"):
            group = "the MLP" if ".mlp." in name else "attention"
        found[group].append((name, tensor))
    return found


def probe(engine: Any) -> tuple[list[float], list[int] | None]:
    """Logprobs of the tokens of ``PROBE`` after the first, and the policy versions of new ones, if
    the engine has them."""
    replies = engine.generate(
        input_ids=[PROBE],
        sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    meta = replies[0]["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta.get("policy_version")
