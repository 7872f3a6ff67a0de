"""Extract the ``--fp8rl-*`` flags from a command line for SGLang."""

import difflib
import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NoReturn

from server_args.args import Fp8RLServerArgs, flag_name

OUR_PREFIX = "--fp8rl"
"""No flag of SGLang begins with it, so any other argument that does is a mistake."""


class _RaisingParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(
    argv: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Fp8RLServerArgs, list[str]]:
    """Split a command line into our options and the rest.

    A flag overrides its ``FP8RL_*`` variable, which overrides the default.

    Args:
        argv: the arguments, without the program's name.
        environ: the environment to read missing flags from.

    Returns:
        Our options, and the other arguments in their order.

    Raises:
        ValueError: a value is wrong, or an argument before ``--`` begins with ``--fp8rl`` and is
            not one of our flags.
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
