"""Every option of the engine side, as one frozen dataclass.

The same option is a field (``bucket_bytes``), a flag (``--fp8rl-bucket-bytes``) and an environment
variable (``FP8RL_BUCKET_BYTES``). The environment carries the options into SGLang's child
processes, which are spawned and so inherit nothing else.
"""

import math
import os
import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from server_args.layers import check_pattern

ENV_PREFIX = "FP8RL_"
FLAG_PREFIX = "--fp8rl-"
BUCKET_ALIGNMENT = 512
"""Bytes. A half of a bucket must keep 256-byte alignment, which CUDA gives."""
KV_CACHES = ("int8", "e4m3")
KV_SCHEMES = ("engine", "trainer", "unit")
FORMATS = ("block-fp8", "block-fp8-ue8m0")
RAGGED = ("pad", "bf16")
LISTEN_SCOPES = ("loopback", "any")
NETWORKS = ("tcp", "nixl")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _option(
    default: Any,
    help_: str,
    parse: Callable[[str], object] = str,
    *,
    choices: tuple[str, ...] = (),
    repr_: bool = True,
) -> Any:
    """A field: its default, its ``--help`` text, the parser of its text form, and its choices."""
    told = f"{help_}: {', '.join(choices)}" if choices else help_
    metadata = {"help": told, "parse": parse, "choices": choices}
    return field(default=default, repr=repr_, metadata=metadata)


def _parse_size(text: str) -> int:
    """``"512MiB"``, ``"1GiB"`` or ``"1048576"`` as a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) * UNITS[match[2]]


def _parse_patterns(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True)
class Fp8RLServerArgs:
    """Options of an SGLang engine that runs with ``--quantization fp8rl``.

    Raises:
        ValueError: a value is out of range; one sentence names the option and the remedy.
    """

    bucket_bytes: int = _option(1 << 30, "bytes of the update bucket; KiB, MiB, GiB", _parse_size)
    """Bytes of shared memory for weights in flight; default 1 GiB.

    One half is filled while the other is applied; where one GPU would do both, a chunk takes all
    of it. A smaller bucket leaves more memory to the KV cache, a larger one saves round trips; a
    multiple of 512.
    """
    ignored_layers: tuple[str, ...] = _option(
        (), "layers that stay BF16: substrings or re:REGEX", _parse_patterns
    )
    """Patterns of layers that stay BF16; default none. See ``server_args.matches``.

    In text form they are separated by spaces, since a regex may contain commas.
    """
    format: str = _option(FORMATS[0], "what layers keep their weights in", choices=FORMATS)
    """What layers keep their weights in; default ``"block-fp8"``.

    ``"block-fp8"``: one scale for each block of 128x128. ``"block-fp8-ue8m0"``: the same with
    scales that are powers of two, of activations too.
    """
    ragged: str = _option(RAGGED[0], "layers whose sizes are not multiples of 128", choices=RAGGED)
    """What becomes of a layer whose sides on a rank are not multiples of 128; default ``"pad"``.

    ``"pad"``: it is FP8, in storage that zeros fill up to whole blocks, unless that is as large as
    BF16. ``"bf16"``: it stays BF16.
    """
    kv_cache: str | None = _option(None, "format of an 8-bit KV cache", choices=KV_CACHES)
    """Format of an 8-bit KV cache; default none, where ``--kv-cache-dtype fp8_e4m3`` is ``"e4m3"``.

    ``"int8"``: a scale for each token and head, and K rotated. ``"e4m3"``: a scale for each layer,
    which follows the policy.
    """
    kv_scheme: str = _option(
        KV_SCHEMES[0], "FP8 KV scales if an update has none", choices=KV_SCHEMES
    )
    """Where the scales of an FP8 KV cache come from if an update has none.

    Default ``"engine"``: kept, if they suit the first prefill after it. ``"trainer"``: such an
    update is refused. ``"unit"``: every scale is 1. Scales in an update are used under every
    scheme.
    """
    kv_scales: str | None = _option(None, "JSON file of FP8 KV scales to start with")
    """JSON file with the initial scales, as the control message ``kv`` returns them."""
    key: str | None = _option(
        None, "shared secret of the control route; FP8RL_KEY hides it from ps", repr_=False
    )
    """Shared secret that a control request must carry as ``Authorization: Bearer KEY``.

    Default none; required if ``listen`` is ``"any"``. ``repr`` never shows it.
    """
    listen: str = _option(LISTEN_SCOPES[0], "who may send control requests", choices=LISTEN_SCOPES)
    """Peers that may use ``POST /fp8rl``; default ``"loopback"``: this host only.

    The route is on SGLang's own HTTP server, which may itself listen on every address. ``"any"``
    accepts every peer that has the key.
    """
    network: str = _option(NETWORKS[0], "how weights come from another host", choices=NETWORKS)
    """How the chunks of a trainer on another host come; default ``"tcp"``.

    ``"nixl"``: the trainer writes them into the engine's host memory by NIXL, which uses RDMA
    where the network has it. All else, and what changed alone, goes over TCP.
    """
    snapshot_bytes: int = _option(
        0, "largest update that may be sent as changes; KiB, MiB, GiB", _parse_size
    )
    """Bytes of the largest update of which a trainer on another host may send the changes alone;
    default 0, with which every update is whole.

    The trainer keeps as much, on its GPU if it has one. The changes are kept in the engine's host
    memory until they are written, at most as many bytes.
    """
    session_timeout_s: float = _option(
        300.0, "seconds of silence after which an update is abandoned", float
    )
    """Seconds without a message after which an update is abandoned; default 300.

    Short enough that a dead trainer does not block the engine forever, long enough for a slow
    gather of a large model.
    """

    def __post_init__(self) -> None:
        _check_integer("bucket_bytes", self.bucket_bytes)
        if self.bucket_bytes <= 0 or self.bucket_bytes % BUCKET_ALIGNMENT:
            raise _invalid(
                "bucket_bytes",
                f"must be a positive multiple of {BUCKET_ALIGNMENT}, not {self.bucket_bytes}",
            )
        _check_integer("snapshot_bytes", self.snapshot_bytes)
        if self.snapshot_bytes < 0:
            raise _invalid("snapshot_bytes", f"must be 0 or more, not {self.snapshot_bytes}")
        if not isinstance(self.ignored_layers, tuple):
            raise _invalid("ignored_layers", "must be a tuple of patterns")
        for pattern in self.ignored_layers:
            try:
                check_pattern(pattern)
            except ValueError as error:
                raise _invalid("ignored_layers", f"pattern {error}") from None
        for option in fields(self):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices and value != option.default and value not in choices:
                raise _invalid(option.name, f"must be one of {', '.join(choices)}, not {value!r}")
        if self.kv_scales is not None and not _is_text(self.kv_scales):
            raise _invalid("kv_scales", f"must name a file, not {self.kv_scales!r}")
        if self.key is not None and not _is_header_safe(self.key):
            raise _invalid("key", "must be printable ASCII without spaces, for an HTTP header")
        if self.listen == "any" and self.key is None:
            raise _invalid("listen", "'any' needs a key; set FP8RL_KEY or listen on loopback")
        timeout = self.session_timeout_s
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not (is_number and math.isfinite(timeout) and timeout > 0):
            raise _invalid("session_timeout_s", f"must be a positive number, not {timeout!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Fp8RLServerArgs":
        """Read the ``FP8RL_*`` variables; missing or empty ones keep their defaults.

        Args:
            environ: the environment to read.

        Returns:
            The options.

        Raises:
            ValueError: a value cannot be parsed or is out of range.
        """
        return cls(**_values_of_env(environ))

    def to_env(self) -> dict[str, str]:
        """The variables from which ``from_env`` makes an equal object.

        Returns:
            Name and text of each option that is not None.
        """
        return {
            env_name(option.name): _text_of(value)
            for option in fields(self)
            if (value := getattr(self, option.name)) is not None
        }

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Add one ``--fp8rl-*`` flag for each field; a missing flag leaves no attribute.

        Args:
            parser: the parser to extend.
        """
        group = parser.add_argument_group("FP8 rollouts (sgl-fp8rl)")
        for option in fields(cls):
            group.add_argument(
                flag_name(option.name),
                dest=_dest(option.name),
                default=SUPPRESS,
                metavar=option.name.upper(),
                help=option.metadata["help"],
            )

    @classmethod
    def from_namespace(
        cls, namespace: Namespace, environ: Mapping[str, str] = os.environ
    ) -> "Fp8RLServerArgs":
        """Options from parsed flags, else from the environment.

        Args:
            namespace: what a parser with these arguments returned.
            environ: the environment to read missing flags from.

        Returns:
            The options.

        Raises:
            ValueError: a value cannot be parsed or is out of range.
        """
        values = _values_of_env(environ)
        for option in fields(cls):
            text = getattr(namespace, _dest(option.name), None)
            if text is not None:
                values[option.name] = _read(option, text, flag_name(option.name))
        return cls(**values)


def env_name(option: str) -> str:
    """The environment variable of an option.

    Args:
        option: a field of ``Fp8RLServerArgs``, such as ``bucket_bytes``.

    Returns:
        Its variable, such as ``FP8RL_BUCKET_BYTES``.
    """
    return ENV_PREFIX + option.upper()


def flag_name(option: str) -> str:
    """The command line flag of an option.

    Args:
        option: a field of ``Fp8RLServerArgs``, such as ``bucket_bytes``.

    Returns:
        Its flag, such as ``--fp8rl-bucket-bytes``.
    """
    return FLAG_PREFIX + option.replace("_", "-")


def _dest(option: str) -> str:
    return f"fp8rl_{option}"


def _values_of_env(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        option.name: _read(option, text, env_name(option.name))
        for option in fields(Fp8RLServerArgs)
        if (text := environ.get(env_name(option.name)))
    }


def _read(option: "Field[Any]", text: str, source: str) -> object:
    try:
        return option.metadata["parse"](text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _text_of(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _invalid(option: str, problem: str) -> ValueError:
    return ValueError(f"{option} ({flag_name(option)}, {env_name(option)}) {problem}")


def _check_integer(option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _invalid(option, f"must be an integer, not {value!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_header_safe(value: object) -> bool:
    return isinstance(value, str) and bool(value) and all("!" <= char <= "~" for char in value)
