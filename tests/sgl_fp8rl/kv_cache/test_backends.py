"""Which attention backends are chosen on which device, and which are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl import compat, doctor
from sgl_fp8rl.engine import hooks, kv_attention, plugin
from sgl_fp8rl.engine.flashinfer_plans import wait_for_copy
from sgl_fp8rl.kv_cache import backends
from sgl_fp8rl.kv_cache.backends import XQA, Capability, choose

HOPPER, ADA, BLACKWELL = (9, 0), (8, 9), (10, 0)


@pytest.mark.parametrize(
    ("capability", "given", "chosen"),
    [
        (None, {}, {"attention_backend": "torch_native"}),
        (None, {"attention_backend": "torch_native"}, {}),
        (
            HOPPER,
            {},
            {
                "attention_backend": "flashinfer",
                "prefill_attention_backend": "flashinfer",
                "decode_attention_backend": XQA,
                "page_size": 64,
            },
        ),
        # `attention_backend` alone means both
        (HOPPER, {"attention_backend": "flashinfer"}, {}),
        (
            HOPPER,
            {"decode_attention_backend": "flashinfer"},
            {"attention_backend": "flashinfer", "prefill_attention_backend": "flashinfer"},
        ),
        (
            HOPPER,
            {"attention_backend": "flashinfer", "decode_attention_backend": XQA},
            {"page_size": 64},
        ),
        (
            HOPPER,
            {"prefill_attention_backend": "flashinfer", "page_size": 32},
            {"attention_backend": "flashinfer", "decode_attention_backend": XQA},
        ),
        *(
            (
                capability,
                {},
                {
                    "attention_backend": "flashinfer",
                    "prefill_attention_backend": "flashinfer",
                    "decode_attention_backend": "flashinfer",
                },
            )
            for capability in (ADA, BLACKWELL)
        ),
        (ADA, {"attention_backend": "flashinfer", "page_size": 1}, {}),
    ],
)
def test_choice(capability: Capability, given: dict[str, Any], chosen: dict[str, Any]) -> None:
    unset = dict.fromkeys(backends.ARGUMENTS)
    assert choose(given, capability) == chosen
    assert choose({**unset, **given}, capability) == chosen


@pytest.mark.parametrize(
    ("capability", "given", "message"),
    [
        (HOPPER, {"attention_backend": "fa3"}, "fa3 cannot apply .* in prefill"),
        (HOPPER, {"attention_backend": "triton"}, "use flashinfer"),
        (HOPPER, {"attention_backend": XQA}, f"{XQA} cannot apply .* in prefill"),
        (HOPPER, {"decode_attention_backend": "fa3"}, f"in decode .* {XQA} or flashinfer"),
        (BLACKWELL, {"decode_attention_backend": XQA}, "in decode"),
        (ADA, {"decode_attention_backend": XQA}, "in decode"),
        (None, {"attention_backend": "flashinfer"}, "use torch_native"),
        (HOPPER, {"page_size": 1}, "--page-size 1 is not supported by"),
        (HOPPER, {"page_size": 256}, "--page-size 256 is not supported by"),
    ],
)
def test_refusals(capability: Capability, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(given, capability)


def test_every_backend_that_is_chosen_has_a_reason() -> None:
    for capability in (None, HOPPER, ADA):
        for names in backends.scaled_backends(capability).values():
            assert set(names) <= set(backends.REASONS)


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp4_e2m1", "mxfp8"])
def test_other_formats_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"cannot scale a KV cache of dtype {dtype}"):
        backends.check_dtype(dtype)


def test_formats() -> None:
    assert backends.check_dtype("fp8_e4m3")
    assert not any(map(backends.check_dtype, (None, "auto", "bf16", "bfloat16")))


# -- through the arguments of SGLang


def resolved(**changes: Any) -> Any:
    """SGLang's arguments on a CPU, as far as they are looked at."""
    return SimpleNamespace(
        **{
            "quantization": "fp8rl",
            "kv_cache_dtype": "fp8_e4m3",
            "attention_backend": "torch_native",
            "prefill_attention_backend": None,
            "decode_attention_backend": None,
            "cuda_graph_backend_prefill": None,
            "cuda_graph_config": None,
            **changes,
        }
    )


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "capability", lambda: None)
    for option in ("FP8RL_KV_SCHEME", "FP8RL_KV_SCALES"):
        monkeypatch.delenv(option, raising=False)


@pytest.mark.parametrize(
    ("argv", "added"),
    [
        (
            ["--quantization", "fp8rl", "--kv-cache-dtype=fp8_e4m3"],
            ["--attention-backend", "torch_native"],
        ),
        (["--quantization=fp8rl"], []),
        (["--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3"], []),
    ],
)
def test_flags(argv: list[str], added: list[str]) -> None:
    passed: list[str] = []

    def prepare(rest: list[str]) -> Any:
        passed.extend(rest)
        return resolved(quantization=None)

    plugin.parse_cli_args(prepare, argv)
    assert passed == argv + added


def test_a_flag_that_cannot_scale_ends_the_server_with_a_sentence() -> None:
    argv = ["--quantization", "fp8rl", "--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "fa3"]
    with pytest.raises(SystemExit, match="fa3 cannot apply the scales"):
        plugin.parse_cli_args(lambda _: resolved(), argv)


@pytest.mark.parametrize(
    ("capability", "decode"), [(None, "torch_native"), (HOPPER, XQA), (ADA, "flashinfer")]
)
def test_the_doctor_tells(
    capability: Capability, decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "capability", lambda: capability)
    (check,) = doctor.check_kv_cache()
    assert check.status == "ok"
    assert f"decode {decode}: {backends.REASONS[decode]}" in check.message


def test_on_hopper_flags_choose_xqa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "capability", lambda: HOPPER)
    chosen = plugin._for_fp8_kv({"quantization": "fp8rl", "kv_cache_dtype": "fp8_e4m3"})
    assert chosen["decode_attention_backend"] == XQA


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_backend": "triton"}, "triton cannot apply"),
        ({"decode_attention_backend": "fa3"}, "fa3 cannot apply"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "cannot scale a KV cache of dtype fp8_e5m2"),
        ({"cuda_graph_backend_prefill": "full"}, "hides the prefill"),
        (
            {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
            "hides the prefill",
        ),
        ({"dcp_size": 2}, "--dcp-size 2"),
    ],
)
def test_what_sglang_was_told_elsewhere_is_held_too(changes: dict[str, Any], message: str) -> None:
    options = Fp8RLServerArgs()
    plugin.refuse_kv_cache(resolved(), options)
    with pytest.raises(ValueError, match=message):
        plugin.refuse_kv_cache(resolved(**changes), options)


def test_a_file_of_scales_is_looked_for_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"no KV scales can be read from /absent\.json"):
        plugin.refuse_kv_cache(resolved(), Fp8RLServerArgs(kv_scales="/absent.json"))


# -- in the process that serves


class Registry:
    """SGLang's, as far as it is used; it applies what it was given, or logs and forgets it."""

    def __init__(self, applies: bool = True) -> None:
        self._patched: set[str] = set()
        self.hooks: dict[str, Any] = {}
        self._applies = applies

    def register(self, target: str, hook: Any, _: Any) -> None:
        assert target not in self.hooks, "wrapped twice"
        self.hooks[target] = hook

    def apply_hooks(self) -> None:
        if self._applies:
            self._patched |= self.hooks.keys()

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> "Registry":
        """Stand in SGLang's place; returns itself."""
        monkeypatch.setitem(compat.__dict__, "HookRegistry", self)
        monkeypatch.setitem(compat.__dict__, "HookType", SimpleNamespace(AROUND="around"))
        monkeypatch.setattr(compat, "_look_up", lambda _: self)
        return self


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (
            "flashinfer",
            XQA,
            {
                "FlashInferAttnBackend.forward_extend": kv_attention.folded_extend,
                "TRTLLMHAAttnBackend.forward_decode": kv_attention.xqa_decode,
            },
        ),
        (
            "flashinfer",
            "flashinfer",
            {
                "FlashInferAttnBackend.forward_extend": kv_attention.folded_extend,
                "FlashInferAttnBackend.forward_decode": kv_attention.folded_decode,
            },
        ),
        (
            "torch_native",
            "torch_native",
            {
                "TorchNativeAttnBackend.forward_extend": kv_attention.folded_extend,
                "TorchNativeAttnBackend.forward_decode": kv_attention.folded_decode,
            },
        ),
    ],
)
def test_what_serves_is_wrapped_once(
    prefill: str, decode: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry().replace(monkeypatch)
    for _ in "twice":
        hooks.wrap_attention(prefill, decode, nn.Module())
    wrapped = {".".join(t.split(".")[-2:]): hook for t, hook in registry.hooks.items()}
    assert wrapped == expected


def test_plans_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry().replace(monkeypatch)
    for _ in "twice":
        hooks.wrap_plans()
    assert registry.hooks == {compat.FLASHINFER_PLAN: wait_for_copy}


def test_a_backend_that_cannot_be_wrapped_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    Registry(applies=False).replace(monkeypatch)
    with pytest.raises(compat.IncompatibleSGLangError, match="did not let sgl-fp8rl wrap"):
        hooks.wrap_attention("flashinfer", XQA, nn.Module())
