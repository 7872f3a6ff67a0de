"""Temperature sampling with log-probabilities: SGLang's ``Sampler.forward`` and our way around it.

Both run as the engine runs them, outside of CUDA graphs. Shape suffixes: B rows, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import measuring
from benchmarks.kernels.pair import DECODE, SHAPE, Pair

DEVICE = "cuda"
CALLS = 20
SEEDS = 2
SPREAD = 3.0
"""Standard deviation of logits."""
TEMPERATURES = (1.0, 0.6, 1.3, 0.8)
BEHIND = 2e-6
"""By so much may the drawn token be behind the best, as log p - log noise: FP32's rounding. 0 on an
H200."""
LOGPROB_ERROR = 1e-5
"""Of ours against float64; 1.1e-6 on an H200."""
APART = 3e-5
"""Between ours and SGLang's; 9.5e-7 on an H200."""
OTHER_TOKENS = 0.001
"""Share of rows that may draw another token than SGLang's; none did on an H200."""


def pairs() -> Iterator[Pair]:
    """Every batch of a decode step, with a temperature of 1 as in training."""
    with _no_engine() as sampler:
        for rows in DECODE:
            yield pair(sampler, rows, SHAPE.vocab)


def pair(sampler: Any, rows: int, vocab: int) -> Pair:
    """One batch. SGLang's sampler writes probabilities over its logits, so each has its own."""
    ones, mixed = (_info(rows, vocab, mixed=mixed) for mixed in (False, True))
    logits_BV = torch.randn(rows, vocab, device=DEVICE) * SPREAD

    def check() -> None:
        for info in (ones, mixed):
            assert_alike(sampler, rows, vocab, info)

    return Pair(
        "sample + logprobs",
        str(rows),
        logits_BV.nbytes,
        check,
        [partial(_step, stock_sample, sampler, logits_BV.clone(), ones)] * CALLS,
        [partial(_step, our_sample, sampler, logits_BV, ones)] * CALLS,
        measuring.queued_us,
    )


def assert_alike(sampler: Any, rows: int, vocab: int, info: Any) -> None:
    """Check that a seed gives both the same tokens and numbers after them, and right logprobs.

    Raises:
        RuntimeError: it does not.
    """
    from sgl_fp8rl.ops import sample

    others = 0
    for seed in range(SEEDS):
        logits_BV = torch.randn(rows, vocab, device=DEVICE) * (SPREAD - seed)
        torch.manual_seed(seed)
        theirs, theirs_logprobs = _step(stock_sample, sampler, logits_BV.clone(), info)
        after = torch.rand(1, device=DEVICE)
        torch.manual_seed(seed)
        mine, logprobs = _step(our_sample, sampler, logits_BV.clone(), info)
        if not torch.equal(torch.rand(1, device=DEVICE), after):
            raise RuntimeError("ours takes other random numbers than SGLang's sampler")
        torch.manual_seed(seed)
        noise_BV = sample.exponential_noise(logits_BV)
        exact_BV = torch.log_softmax((logits_BV / info.temperatures).double(), -1)
        keys_BV = exact_BV - noise_BV.double().log()
        at = mine.long()[:, None]
        other = mine != theirs
        others += int(other.sum())
        behind = float((keys_BV.amax(-1) - keys_BV.gather(1, at)[:, 0]).max())
        error = float((logprobs - exact_BV.gather(1, at)[:, 0]).abs().max())
        apart = float((logprobs - theirs_logprobs).masked_fill(other, 0.0).abs().max())
        if not (behind < BEHIND and error < LOGPROB_ERROR and apart < APART):
            raise RuntimeError(
                f"ours drew a token {behind:.1e} behind the best; logprobs are {error:.1e} from "
                f"float64's and {apart:.1e} from SGLang's"
            )
    if others > max(1, OTHER_TOKENS * rows * SEEDS):
        raise RuntimeError(f"{others} of {rows * SEEDS} tokens are not those of SGLang's sampler")


def stock_sample(sampler: Any, *batch: Any) -> torch.Tensor:
    """SGLang's way."""
    tokens_B: torch.Tensor = type(sampler).forward(sampler, *batch)
    return tokens_B


def our_sample(sampler: Any, *batch: Any) -> torch.Tensor:
    """Ours, which must not leave the batch to SGLang."""
    from sgl_fp8rl.engine.layers.sampler import fast_sample

    tokens_B: torch.Tensor = fast_sample(_refuse, sampler, *batch)
    return tokens_B


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("our sampler left the batch to SGLang's")


def _step(
    sample: Any, sampler: Any, logits_BV: torch.Tensor, info: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their logprobs."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    rows = len(logits_BV)
    output = LogitsProcessorOutput(next_token_logits=logits_BV)
    tokens_B = sample(sampler, output, info, True, [0] * rows, [None] * rows, torch.zeros(rows))
    return tokens_B, output.next_token_logprobs


def _info(rows: int, vocab: int, *, mixed: bool) -> Any:
    """A batch of requests that shape their distribution by temperature alone."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    one_B = torch.ones(rows, device=DEVICE)
    temperatures_B = torch.tensor(TEMPERATURES, device=DEVICE).repeat(rows)[:rows]
    return SamplingBatchInfo(
        temperatures=(temperatures_B if mixed else one_B).view(-1, 1),
        top_ps=one_B,
        top_ks=torch.full((rows,), 1 << 30, dtype=torch.int32, device=DEVICE),
        min_ps=torch.zeros_like(one_B),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=vocab,
        return_sampling_masks=[False] * rows,
        device=DEVICE,
    )


@contextmanager
def _no_engine() -> Iterator[Any]:
    """SGLang's sampler with the settings that an engine on one GPU with our quantization has."""
    from sglang.srt.layers import sampler as stock

    from sgl_fp8rl.constants import NAME
    from sgl_fp8rl.engine import compat

    arguments = SimpleNamespace(
        deterministic=SimpleNamespace(
            rl_on_policy_target=None, enable_deterministic_inference=False
        ),
        kernel=SimpleNamespace(sampling_backend="flashinfer"),
        features=SimpleNamespace(sampling_mask_max_tokens=8),
    )
    group = SimpleNamespace(device_group=None)
    parallel = SimpleNamespace(tp_group=group, attn_cp_size=1, attn_tp_group=group)
    settings = {
        "get_exec": arguments,
        "get_tp_group": group,
        "get_parallel": parallel,
        "is_dp_attention_enabled": False,
    }
    with ExitStack() as stack:
        for name, answer in settings.items():
            given = partial(lambda answer: answer, answer)
            # not every version asks for all of it
            stack.enter_context(patch.object(stock, name, given, create=True))
        model = SimpleNamespace(quantization=NAME)
        stack.enter_context(patch.object(compat, "get_model_args", lambda: model))
        yield stock.Sampler()
