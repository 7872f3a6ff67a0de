"""What the plugin does to a process before an engine starts: options, and layouts it refuses."""

from argparse import ArgumentParser
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

from server_args import Fp8RLServerArgs
from sgl_fp8rl import compat
from sgl_fp8rl.engine import plugin
from sgl_fp8rl.options import current_options

MODEL = {"model_path": "dummy", "quantization": "fp8rl"}
"""SGLang resolves no argument of a model of that name."""


def test_options_of_ours_and_of_sglang_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "512")  # put back at the end
    server_args = plugin.parse_engine_kwargs(**MODEL, tp_size=2, fp8rl_bucket_bytes=1024)
    assert (server_args.quantization, server_args.tp_size) == ("fp8rl", 2)
    assert current_options().bucket_bytes == 1024


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_worker_num", 2),
        ("dp_size", 2),
        ("enable_dp_attention", True),
        ("pp_size", 2),
        ("nnodes", 2),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "decode"),
        ("enable_eplb", True),
        ("elastic_ep_backend", "mooncake"),
        ("weight_cache_mode", "client"),
        ("enable_lora", True),
        ("hicache_storage_backend", "file"),
        ("enable_lmcache", True),
    ],
)
def test_a_layout_that_updates_cannot_reach_is_refused(field: str, value: Any) -> None:
    """By the flag's name, which must be one of SGLang's; stock engines are undisturbed."""
    with pytest.raises(ValueError, match=f"--[a-z-]+ {value}") as refusal:
        plugin.parse_engine_kwargs(**MODEL, **{field: value})
    parser = ArgumentParser()
    compat.ServerArgs.add_cli_args(parser)
    (flag,) = {word for word in str(refusal.value).split() if word.startswith("--")}
    assert {action.dest for action in parser._actions if flag in action.option_strings} == {field}
    stock = plugin.parse_engine_kwargs(**MODEL | {"quantization": "fp8"}, **{field: value})
    assert getattr(stock, field) == value


def test_arguments_of_a_framework_are_checked_in_the_scheduler() -> None:
    """It made them itself, so no parser of ours ran; SGLang loads the model in ``__init__``."""
    started: list[Any] = []

    def original(scheduler: Any, *args: Any, **keywords: Any) -> None:
        started.append((scheduler, args, keywords))

    stock = compat.ServerArgs(**MODEL | {"quantization": "fp8"}, dp_size=2)
    plugin.check_scheduler_args(original, "scheduler", stock, 1, rank=0)
    assert started == [("scheduler", (stock, 1), {"rank": 0})]
    refused = compat.ServerArgs(**MODEL, dp_size=2)
    with pytest.raises(ValueError, match="--dp-size 2"):
        plugin.check_scheduler_args(original, "scheduler", refused, 1, rank=0)
    cache = compat.ServerArgs(**MODEL, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="fp8_e5m2"):
        plugin.check_scheduler_args(original, "scheduler", cache)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        ({}, None),
        ({"api_key": "ours"}, None),
        ({"api_key": "other", "admin_api_key": "ours"}, None),
        ({"api_key": "other"}, "--api-key"),
        ({"api_key": "ours", "admin_api_key": "other"}, "--admin-api-key"),
    ],
)
def test_one_header_must_carry_both_keys(keys: dict[str, str], flag: str | None) -> None:
    server_args = compat.ServerArgs(**MODEL, **keys)
    plugin.refuse_second_key(server_args, None)
    if flag is None:
        plugin.refuse_second_key(server_args, "ours")
        return
    with pytest.raises(ValueError, match=flag) as refusal:
        plugin.check_server_args(server_args, Fp8RLServerArgs(key="ours"))
    assert not {"other", "ours"} & set(str(refusal.value).split())


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(ValueError, match=r"fp8rl_bucket_byte\b"):
        plugin.parse_engine_kwargs(fp8rl_bucket_byte=1)


def test_a_wrong_variable_is_reported_at_registration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current_options()  # read while it was right
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    monkeypatch.setattr(compat, "check_symbols", list)
    plugin.register()
    assert "FP8RL_BUCKET_BYTES" in caplog.text
    assert plugin.NAME not in compat.QUANTIZATION_METHODS
