"""Requests that an engine must refuse, each alone: they ended SGLang's scheduler, or its caller."""

from typing import Any

VOCAB = 512
"""Of ``models``' tiny ones."""
WRONG_SAMPLING: list[dict[str, Any]] = [
    {name: value}
    for name, values in {
        **{"max_new_tokens": [1.5, 2.0, "2", True], "temperature": ["1", True, [1.0]]},
        **{"top_p": ["0.9"], "top_k": [1.5], "min_p": [[]], "n": [1.0, True], "ignore_eos": [1]},
        **{"stop": [5, [5]], "stop_regex": [5], "stop_token_ids": [5, ["a"]]},
        **{"skip_special_tokens": ["no"], "logit_bias": [{"5": "x"}, [1]], "sampling_seed": [1.5]},
        **{"json_schema": [{"type": "object"}], "custom_params": [{"a": {"b": {"c": 1}}}]},
        **{"stream_interval": [1.5], "no_such_parameter": [1]},
    }.items()
    for value in values
]
"""Sampling parameters of a wrong kind, which JSON can carry."""
WRONG_IDS: list[list[Any]] = [
    *([VOCAB], [1, VOCAB, 2], [-1], [1, -(2**40)], [2**40], [2**63 - 1]),
    *([2**64], ["a"], [1.5], [None]),
]
"""Prompts with a token id that a model of ``VOCAB`` tokens does not have."""
