"""Take the ``--fp8rl-*`` flags out of a command line that is meant for SGLang."""

import difflib
import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NoReturn

from server_args.args import Fp8RLServerArgs, flag_name

OUR_PREFIX = "--fp8rl"
"""No flag of SGLang begins with it, so what is left over and does is a mistake."""


class _RaisingParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Fp8RLServerArgs, list[str]]:
    """Split ``argv`` into our options and the rest, which keeps its order.

    A flag wins over its ``FP8RL_*`` variable, which wins over the default.

    Raises:
        ValueError: a value is wrong, or an argument before ``--`` begins with ``--fp8rl`` and is no
            flag of ours.
    """
    parser = _RaisingParser(add_help=False, allow_abbrev=False)
    Fp8RLServerArgs.add_arguments(parser)
    namespace, rest = parser.parse_known_args(argv)
    for argument in rest:
        if argument == "--":
            break
        if argument.startswith(OUR_PREFIX):
            raise ValueError(_unknown_flag(argument))
    return Fp8RLServerArgs.from_namespace(namespace, environ), rest


def _unknown_flag(argument: str) -> str:
    known = [flag_name(option.name) for option in fields(Fp8RLServerArgs)]
    flag = argument.partition("=")[0]
    close = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the flags are {', '.join(known)}"
    return f"unknown flag {flag}; {remedy}"
