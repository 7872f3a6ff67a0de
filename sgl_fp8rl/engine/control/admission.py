"""What a request must be before an engine takes it: a bad value costs that request alone.

The scheduler decodes a request by the types of its fields and ends the engine at another one, so
kinds of values are checked in the main process, which has not sent it yet; SGLang answers their
``ValueError`` with status 400. Token ids are checked in the scheduler, whatever they came through.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat.settings import is_fp8rl
from sgl_fp8rl.engine.control.internal_requests import tag_warm_up
from sgl_fp8rl.protocol.values import excerpt

WRONG_KIND = (
    *(TypeError, AttributeError, OverflowError, RecursionError),
    *(msgspec.MsgspecError, re.error),
)
"""What SGLang raises for a value of the wrong type, and for an invalid regex."""
OPAQUE = ("mm_inputs", "mm_data_mooncake", "time_stats")
"""Fields of a request that SGLang sends pickled."""


def check_kinds(original: Any, manager: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``TokenizerManager.generate_request``: refuse token ids and sampling parameters of a
    wrong kind."""
    if is_fp8rl(manager.server_args):
        given = obj.sampling_params
        reasons = map(why_not_sampling, given if isinstance(given, list) else [given])
        if (why := next(filter(None, (why_not_ids(obj.input_ids), *reasons)), None)) is not None:
            raise ValueError(why)
    return tag_warm_up(original, manager, obj, *args, **kw)


def why_not_ids(given: Any) -> str | None:
    """Why the token ids of a prompt, or of a list of prompts, are refused; None if they are valid
    or not given."""
    if given is None:
        return None
    if not isinstance(given, Iterable):
        return f"input_ids is {excerpt(given)}; give a list of token ids"
    if isinstance(given, list) and given and isinstance(given[0], list):
        return next(filter(None, map(why_not_ids, given)), None)
    if all(hasattr(kind, "__index__") for kind in set(map(type, given))):
        return None
    index, found = next((i, x) for i, x in enumerate(given) if not hasattr(x, "__index__"))
    return f"token {index} of the prompt is {excerpt(found)}; token ids are whole numbers"


def why_not_sampling(given: Any) -> str | None:
    """Why the scheduler could not decode these sampling parameters; None if it could."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return f"sampling_params is {excerpt(given)}; give a dict of names and values"
    if _fault_of(given) is None:
        return None
    for name, value in given.items():
        if (fault := _fault_of({name: value})) is not None:
            return f"the sampling parameter {name} is {excerpt(value)}: {fault}"
    return f"sampling_params is {excerpt(given)}: {_fault_of(given)}"


def _fault_of(given: Mapping[str, Any]) -> str | None:
    try:
        sent = compat.msgpack_encode(compat.SamplingParams(**given))
        msgspec.msgpack.decode(sent, type=compat.SamplingParams)
    except (*WRONG_KIND, ValueError) as error:
        return _sentence(error)
    return None


def check_fields(original: Any, manager: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``TokenizerManager._create_tokenized_object``: refuse what the scheduler could not
    decode."""
    if not is_fp8rl(manager.server_args):
        return original(manager, obj, *args, **kw)
    try:
        made = original(manager, obj, *args, **kw)
        sent = copy.copy(made)
        for name in OPAQUE:
            if hasattr(sent, name):
                setattr(sent, name, None)
        compat.msgpack_decode(compat.msgpack_encode(sent))
    except WRONG_KIND as error:
        raise ValueError(
            f"the request has a value that the scheduler does not take: {_sentence(error)}"
        ) from error
    return made


def _sentence(error: Exception) -> str:
    """What an error says, without the place that msgspec adds, which counts fields."""
    return str(error).partition(" - at ")[0]


def why_not_in_vocabulary(request: Any, size: int) -> str | None:
    """Which prompt token the model has no embedding of; None if it has all.

    Placeholders of images are the model's, and some lie beyond the vocabulary; SGLang puts
    embeddings in their place, as it does for a prompt of embeddings.
    """
    if request.mm_inputs is not None or getattr(request, "input_embeds", None) is not None:
        return None
    ids_T = np.asarray(request.input_ids, dtype=np.int64)
    outside = np.flatnonzero((ids_T < 0) | (ids_T >= size))
    if not outside.size:
        return None
    index = int(outside[0])
    return (
        f"token {index} of the prompt is {ids_T[index]}, and the model's vocabulary has {size} "
        f"tokens; encode the prompt with the tokenizer of this model"
    )
