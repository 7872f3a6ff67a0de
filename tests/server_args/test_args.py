"""Options: validation, and the way through the environment into spawned processes."""

import dataclasses
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_args import Fp8RLServerArgs, env_name

PRINTABLE = st.characters(min_codepoint=33, max_codepoint=126)
WORDS = st.text(PRINTABLE, min_size=1, max_size=12)


def valid_args() -> st.SearchStrategy[Fp8RLServerArgs]:
    patterns = WORDS.filter(lambda word: "," not in word and not word.startswith("re:"))
    regexes = st.sampled_from(["re:^model\\.layers\\.[0-3]\\.", "re:a{1,2}", "re:."])
    return st.builds(
        Fp8RLServerArgs,
        bucket_bytes=st.integers(1, 1 << 40).map(lambda number: number * 512),
        ignored_layers=st.lists(patterns | regexes, max_size=4).map(tuple),
        format=st.sampled_from(["block-fp8", "block-fp8-ue8m0"]),
        ragged=st.sampled_from(["pad", "bf16"]),
        kv_cache=st.sampled_from([None, "int8", "e4m3"]),
        kv_scheme=st.sampled_from(["engine", "trainer", "unit"]),
        kv_scales=st.none() | WORDS,
        key=WORDS,
        listen=st.sampled_from(["loopback", "any"]),
        network=st.sampled_from(["tcp", "nixl"]),
        snapshot_bytes=st.integers(0, 1 << 50),
        session_timeout_s=st.floats(min_value=1e-3, max_value=1e9),
    )


@given(valid_args())
def test_environment_round_trip(args: Fp8RLServerArgs) -> None:
    environ = args.to_env()
    assert all(isinstance(value, str) for value in environ.values())
    assert Fp8RLServerArgs.from_env(environ) == args


def test_every_field_travels() -> None:
    """A field that the strategy above forgets would be lost on its way and not noticed."""
    every_field = {
        "bucket_bytes": 1024,
        "ignored_layers": ("lm_head", "re:x"),
        "format": "block-fp8-ue8m0",
        "ragged": "bf16",
        "kv_cache": "int8",
        "kv_scheme": "trainer",
        "kv_scales": "/scales.json",
        "key": "secret",
        "listen": "any",
        "network": "nixl",
        "snapshot_bytes": 1 << 35,
        "session_timeout_s": 1.5,
    }
    names = {field.name for field in dataclasses.fields(Fp8RLServerArgs)}
    assert set(every_field) == names
    environ = Fp8RLServerArgs(**every_field).to_env()
    assert set(environ) == {env_name(name) for name in names}
    assert Fp8RLServerArgs.from_env(environ) == Fp8RLServerArgs(**every_field)


def test_defaults_need_no_environment() -> None:
    args = Fp8RLServerArgs.from_env({})
    assert args == Fp8RLServerArgs()
    assert args.bucket_bytes == 1024**3
    assert args.key is None
    assert args.listen == "loopback"
    assert "FP8RL_KEY" not in args.to_env()


def test_empty_variable_is_as_absent() -> None:
    empty = {env_name(field.name): "" for field in dataclasses.fields(Fp8RLServerArgs)}
    assert Fp8RLServerArgs.from_env(empty) == Fp8RLServerArgs()


def test_child_process_reads_what_the_parent_wrote() -> None:
    args = Fp8RLServerArgs(bucket_bytes=2048, ignored_layers=("a", "re:b c".replace(" ", r"\s")))
    code = "from server_args import Fp8RLServerArgs; print(Fp8RLServerArgs.from_env())"
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=args.to_env(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == repr(args)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512", 512), ("4KiB", 4096), ("512MiB", 512 << 20), ("1GiB", 1 << 30), (" 2 GiB ", 2 << 30)],
)
def test_sizes(text: str, expected: int) -> None:
    assert Fp8RLServerArgs.from_env({"FP8RL_BUCKET_BYTES": text}).bucket_bytes == expected


@pytest.mark.parametrize("text", ["1GB", "1gib", "1.5GiB", "-1", "0x200", "1 2", "GiB", "1e9"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"FP8RL_BUCKET_BYTES.*{re.escape(text)}"):
        Fp8RLServerArgs.from_env({"FP8RL_BUCKET_BYTES": text})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bucket_bytes", 0, "multiple of 512"),
        ("bucket_bytes", -512, "multiple of 512"),
        ("bucket_bytes", 768, "multiple of 512"),
        ("bucket_bytes", 1e9, "integer"),
        ("bucket_bytes", True, "integer"),
        ("ignored_layers", "lm_head", "tuple"),
        ("ignored_layers", ("",), "every layer"),
        ("ignored_layers", ("re:",), "every layer"),
        ("ignored_layers", ("re:(",), "regular expression"),
        ("ignored_layers", ("a,b",), "comma"),
        ("ignored_layers", ("a b",), "space"),
        ("kv_cache", "fp8", "int8, e4m3"),
        ("kv_scheme", "per_token", "engine, trainer, unit"),
        ("kv_scales", " ", "file"),
        ("key", "", "ASCII"),
        ("key", "two words", "ASCII"),
        ("key", "line\nbreak", "ASCII"),
        ("key", "schl\u00fcssel", "ASCII"),
        ("listen", "0.0.0.0", "loopback, any"),
        ("listen", "any", "key"),
        ("network", "rdma", "tcp, nixl"),
        ("snapshot_bytes", -1, "0 or more"),
        ("snapshot_bytes", 1.5, "integer"),
        ("session_timeout_s", 0.0, "positive"),
        ("session_timeout_s", float("nan"), "positive"),
        ("session_timeout_s", float("inf"), "positive"),
        ("session_timeout_s", "300", "positive"),
        ("session_timeout_s", None, "positive"),
        ("session_timeout_s", True, "positive"),
        ("kv_scales", 5, "must name a file"),
        ("key", 5, "printable"),
    ],
)
def test_refusals_name_the_option(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        Fp8RLServerArgs(**{field: value})
    assert {field, env_name(field)} <= set(re.findall(r"\w+", str(refusal.value)))


def test_key_is_never_printed() -> None:
    secret = "correct-horse"
    args = Fp8RLServerArgs(key=secret, listen="any")
    assert secret not in repr(args)
    assert secret not in f"{args}"
    with pytest.raises(ValueError, match="ASCII") as refusal:
        Fp8RLServerArgs(key=secret + " ")
    assert secret not in str(refusal.value)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Fp8RLServerArgs().listen = "any"  # type: ignore[misc]
