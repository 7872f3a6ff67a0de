"""Taking our flags out of SGLang's command line."""

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_args import Fp8RLServerArgs, flag_name, parse

SGLANG_ARGV = [
    "--model-path",
    "a/model",
    "--quantization",
    "fp8rl",
    "--tp=2",
    "--json-model-override-args",
    '{"a": -1}',
    "-1",
]


def test_our_flags_anywhere_and_the_rest_in_order() -> None:
    for position in range(0, len(SGLANG_ARGV), 2):
        argv = [
            *SGLANG_ARGV[:position],
            "--fp8rl-bucket-bytes",
            "64MiB",
            *SGLANG_ARGV[position:],
            "--fp8rl-ignored-layers=lm_head re:a{1,2}",
        ]
        args, rest = parse(argv, {})
        assert rest == SGLANG_ARGV
        assert args == Fp8RLServerArgs(
            bucket_bytes=64 << 20, ignored_layers=("lm_head", "re:a{1,2}")
        )


@given(
    st.lists(st.text(min_size=1, max_size=8).filter(lambda word: not word.startswith("--fp8rl")))
)
def test_a_line_without_our_flags_is_untouched(argv: list[str]) -> None:
    args, rest = parse(argv, {})
    assert rest == argv
    assert args == Fp8RLServerArgs()


def test_flag_beats_environment_beats_default() -> None:
    environ = {"FP8RL_BUCKET_BYTES": "2048", "FP8RL_SESSION_TIMEOUT_S": "7"}
    args, _ = parse(["--fp8rl-bucket-bytes=4096"], environ)
    assert args == Fp8RLServerArgs(bucket_bytes=4096, session_timeout_s=7.0)


def test_flag_mends_a_bad_default_of_the_environment_only_for_its_own_option() -> None:
    with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
        parse(["--fp8rl-key=k"], {"FP8RL_BUCKET_BYTES": "many"})


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--fp8rl-bucket-byte", "--fp8rl-bucket-bytes"),
        ("--fp8rl-bucket_bytes=1024", "--fp8rl-bucket-bytes"),
        ("--fp8rl_listen", "--fp8rl-listen"),
        ("--fp8rl-ignored", "--fp8rl-ignored-layers"),
        ("--fp8rl-zzzzzzzzzzzzz", "--fp8rl-bucket-bytes, "),
    ],
)
def test_mistyped_flags_are_refused(argument: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument.partition('=')[0]}\b") as refusal:
        parse(["--tp", "2", argument, "1"], {})
    assert hint in str(refusal.value)


def test_no_abbreviations() -> None:
    """argparse would otherwise take ``--fp8rl-l`` for ``--fp8rl-listen``."""
    with pytest.raises(ValueError, match=r"--fp8rl-l\b"):
        parse(["--fp8rl-l", "any", "--fp8rl-key", "k"], {})


def test_missing_value_is_a_value_error_and_no_exit() -> None:
    with pytest.raises(ValueError, match="--fp8rl-bucket-bytes"):
        parse(["--fp8rl-bucket-bytes"], {})


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
