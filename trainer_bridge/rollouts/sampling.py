"""The sampling parameters of a rollout: which are sent, and which are refused.

Options that make the engine's logprobs differ from what the trainer computes are refused, and so
are values of another kind than SGLang's: it would find them late, in each request, or not at all.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

import torch.distributed as dist

from sgl_fp8rl.protocol.values import as_python, flag, is_listed, real, shown, token_ids, whole

GREEDY_BELOW = 1e-6  # SGLang samples greedily below this temperature, from unscaled logits
SEED = 42
"""SGLang's, of a request that names none."""
_calls: defaultdict[tuple[int, int], "count[int]"] = defaultdict(count)
"""Of ``rollout``, by seed and version."""


def _texts(name: str, value: Any) -> list[str]:
    """A string, or several."""
    texts = [value] if isinstance(value, str) else value
    if is_listed(texts) and all(isinstance(text, str) for text in texts):
        return list(texts)
    raise ValueError(f"{name} is {shown(value)}; pass a string or a list of strings")


def _patterns(name: str, value: Any) -> list[str]:
    """A regular expression, or several."""
    patterns = _texts(name, value)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{name} has {pattern!r}, which is not a regular expression ({error}); correct it"
            ) from None
    return patterns


def _stop_tokens(name: str, value: Any) -> list[int]:
    """SGLang leaves out each None, such as the id of a token that the tokenizer lacks."""
    given = [token for token in value if token is not None] if is_listed(value) else value
    return token_ids(name, given)


# Sampling options that do not change any token's probability, each with what reads its value.
_HARMLESS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": partial(whole, least=0),
    "stop": _texts,
    "stop_token_ids": _stop_tokens,
    "stop_regex": _patterns,
    "ignore_eos": flag,
    "no_stop_trim": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "sampling_seed": partial(whole, least=-(1 << 63)),
}

# Options that do, each with the values that turn it off. The first of them is always sent, because
# a server fills in omitted options from its --preferred-sampling-params.
_SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_new_tokens": (0,),  # masks the stop tokens until then
    "logit_bias": (None, {}),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
}


def read_sampling(sampling: Mapping[str, Any]) -> tuple[int, float, dict[str, Any]]:
    """Samples per prompt, the temperature of the logprobs, and the parameters to send."""
    if not isinstance(sampling, Mapping):
        raise ValueError(
            f"rollout: sampling is {shown(sampling)}; pass a dict of SGLang's sampling parameters, "
            f"such as {{'max_new_tokens': 256}}"
        )
    given = {
        name: list(value) if isinstance(value, set | frozenset) else as_python(value)
        for name, value in sampling.items()
        if value is not None
    }
    n = whole("rollout: sampling['n']", given.pop("n", 1), least=1)
    temperature = real("rollout: sampling['temperature']", given.pop("temperature", 1.0))
    for name, off in _SWITCHED_OFF.items():
        if given.pop(name, off[0]) not in off:
            raise ValueError(
                f"rollout: sampling[{name!r}] = {shown(sampling[name])} makes the engine's "
                f"logprobs differ from what the trainer computes; leave it out, or set it to "
                f"{off[0]!r}"
            )
    if unknown := sorted(map(str, given.keys() - _HARMLESS.keys())):
        raise ValueError(
            f"rollout: sampling has {unknown}, which may change the logprobs; use only n, "
            f"temperature, {', '.join(sorted(_HARMLESS))}"
        )
    sent = {name: _HARMLESS[name](f"rollout: sampling[{name!r}]", given[name]) for name in given}
    off_values = {name: off[0] for name, off in _SWITCHED_OFF.items()}
    sent |= {**off_values, "temperature": temperature}
    return n, 1.0 if temperature < GREEDY_BELOW else temperature, sent


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Check sampling parameters before there is an engine.

    Raises:
        ValueError: ``rollout`` would refuse them.
    """
    read_sampling(sampling)


def seeded(sampling_params: dict[str, Any], version: int) -> Iterator[dict[str, Any]]:
    """The parameters of each request of one call, with a seed of 63 bits, for SGLang's int64. It is
    a hash: seeds that count up would be those of the calls beside it."""
    seed = sampling_params.get("sampling_seed", SEED)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    call = seed, version, rank, next(_calls[seed, version])
    for number in count():
        digest = blake2b(repr((*call, number)).encode(), digest_size=8).digest()
        yield {**sampling_params, "sampling_seed": int.from_bytes(digest, "big") >> 1}
