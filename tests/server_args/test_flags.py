"""Our flags in a parser, and what they override."""

import argparse
import dataclasses

import pytest

from server_args import Fp8RLServerArgs, flag_name
from tests.server_args.flags import parse


def test_flag_beats_environment_beats_default() -> None:
    environ = {"FP8RL_BUCKET_BYTES": "2048", "FP8RL_SESSION_TIMEOUT_S": "7"}
    args = parse(["--fp8rl-bucket-bytes=4096"], environ)
    assert args == Fp8RLServerArgs(bucket_bytes=4096, session_timeout_s=7.0)


def test_flag_mends_a_bad_default_of_the_environment_only_for_its_own_option() -> None:
    with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
        parse(["--fp8rl-key=k"], {"FP8RL_BUCKET_BYTES": "many"})


def test_patterns_of_layers_are_one_value() -> None:
    args = parse(["--fp8rl-ignored-layers=lm_head re:a{1,2}"], {})
    assert args == Fp8RLServerArgs(ignored_layers=("lm_head", "re:a{1,2}"))


def test_bad_values_name_the_flag() -> None:
    with pytest.raises(ValueError, match="--fp8rl-session-timeout-s"):
        parse(["--fp8rl-session-timeout-s", "soon"], {})


def test_add_arguments_lists_every_option_in_help() -> None:
    parser = argparse.ArgumentParser()
    Fp8RLServerArgs.add_arguments(parser)
    text = parser.format_help()
    for field in dataclasses.fields(Fp8RLServerArgs):
        assert flag_name(field.name) in text
    namespace = parser.parse_args(["--fp8rl-listen", "any", "--fp8rl-key", "k"])
    assert Fp8RLServerArgs.from_namespace(namespace, {}) == Fp8RLServerArgs(listen="any", key="k")
