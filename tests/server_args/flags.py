"""Our options, as a parser with our flags has them."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence

from server_args import Fp8RLServerArgs


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Fp8RLServerArgs:
    parser = ArgumentParser()
    Fp8RLServerArgs.add_arguments(parser)
    return Fp8RLServerArgs.from_namespace(parser.parse_args(argv), environ)
