"""Which attention backends are chosen on which device, and which are refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention import backends, hooks, kv_attention
from sgl_fp8rl.engine.attention.backends import FA3, TRTLLM_MHA, Capability, choose
from sgl_fp8rl.engine.attention.flashinfer_plans import wait_for_copy
from sgl_fp8rl.engine.compat import wrapping
from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.engine.startup import arguments
from sgl_fp8rl.tools.doctor import device
from tests.sgl_fp8rl.resolving import ADA, BLACKWELL, HOPPER, Start


def told(prefill: str | None, decode: str | None = None, page_size: int | None = None) -> Any:
    """Arguments of SGLang's that name these; prefill's is the one for both as well."""
    named = {
        "attention_backend": prefill,
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
        "page_size": page_size,
    }
    return {name: value for name, value in named.items() if value is not None}


def both(backend: str, **more: Any) -> dict[str, Any]:
    return {"attention_backend": backend, **more}


PREFILL, DECODE = "prefill_attention_backend", "decode_attention_backend"


@pytest.mark.parametrize(
    ("capability", "given", "chosen"),
    [
        (None, {}, both("torch_native")),
        (None, both("torch_native"), {}),
        (HOPPER, {}, told(FA3, TRTLLM_MHA, 64)),
        (HOPPER, both("flashinfer"), {}),
        (HOPPER, {DECODE: "flashinfer"}, told(FA3)),
        (HOPPER, both("flashinfer", **{DECODE: TRTLLM_MHA}), {"page_size": 64}),
        (
            HOPPER,
            {PREFILL: "flashinfer", "page_size": 32},
            both("flashinfer", **{DECODE: TRTLLM_MHA}),
        ),
        (HOPPER, {PREFILL: FA3}, both(FA3, **{DECODE: TRTLLM_MHA, "page_size": 64})),
        (ADA, {}, told("flashinfer", "flashinfer")),
        (BLACKWELL, {}, told("flashinfer", "flashinfer")),
        (ADA, both("flashinfer", page_size=1), {}),
    ],
)
def test_choice(capability: Capability, given: dict[str, Any], chosen: dict[str, Any]) -> None:
    unset = dict.fromkeys(backends.ARGUMENTS)
    assert choose(given, capability) == chosen
    assert choose({**unset, **given}, capability) == chosen


@pytest.mark.parametrize(
    ("capability", "given", "message"),
    [
        (HOPPER, both(FA3), f"fa3.*decode.*{TRTLLM_MHA} or flashinfer"),
        (ADA, {PREFILL: FA3}, "fa3.*prefill.*use flashinfer"),
        (HOPPER, both("triton"), "triton.*fa3 or flashinfer"),
        (HOPPER, both(TRTLLM_MHA), f"{TRTLLM_MHA}.*prefill.*use fa3 or flashinfer"),
        (HOPPER, {DECODE: FA3}, f"fa3.*decode.*{TRTLLM_MHA} or flashinfer"),
        (BLACKWELL, {DECODE: TRTLLM_MHA}, f"{TRTLLM_MHA}.*decode.*use flashinfer"),
        (ADA, {DECODE: TRTLLM_MHA}, f"{TRTLLM_MHA}.*decode.*use flashinfer"),
        (None, both("flashinfer"), "use torch_native"),
        *((HOPPER, {"page_size": n}, rf"--page-size {n}\b.*64") for n in (1, 8, 256)),
    ],
)
def test_refusals(capability: Capability, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(given, capability)


def test_formats() -> None:
    assert backends.check_dtype("fp8_e4m3")
    assert not any(map(backends.check_dtype, (None, "auto", "bf16", "bfloat16")))
    for dtype in ("fp8_e5m2", "fp4_e2m1", "mxfp8"):
        with pytest.raises(ValueError, match=f"{dtype}.*--kv-cache-dtype fp8_e4m3"):
            backends.check_dtype(dtype)


# -- what was chosen, elsewhere; with the arguments of SGLang: engine/test_settings.py


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "capability", lambda: None)
    for option in ("FP8RL_KV_SCHEME", "FP8RL_KV_SCALES"):
        monkeypatch.delenv(option, raising=False)


@pytest.mark.parametrize(
    ("capability", "decode"), [(None, "torch_native"), (HOPPER, TRTLLM_MHA), (ADA, "flashinfer")]
)
def test_the_doctor_tells(
    capability: Capability, decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "capability", lambda: capability)
    (check,) = device.check_kv_cache()
    assert check.status == "ok" and f"decode {decode}: " in check.message


@pytest.mark.parametrize(
    ("option", "settings", "message"),
    [
        ({"kv_scheme": "trainer"}, {}, "--fp8rl-kv-scheme"),
        ({"kv_scales": "scales.json"}, {}, "--fp8rl-kv-scales"),
        ({}, {"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({}, {"kv_cache_dtype": "bf16"}, "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_what_int8_cannot_have_is_refused(
    start: Start, option: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    options = Fp8RLServerArgs(kv_cache="int8")
    sound = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"}
    arguments.refuse_kv_cache(resolved(start.made(**sound)), options)
    with pytest.raises(ValueError, match=message):
        arguments.refuse_kv_cache(
            resolved(start.made(**sound | settings)), replace(options, **option)
        )


def test_our_flag_asks_sglang_for_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kv_cache_dtype": None}
    assert arguments.before_resolution(given, Fp8RLServerArgs()) == {}
    for kv_cache in ("int8", "e4m3"):
        told = arguments.before_resolution(given, Fp8RLServerArgs(kv_cache=kv_cache))
        assert told == {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"}
    int8 = Fp8RLServerArgs(kv_cache="int8")
    with pytest.raises(ValueError, match=r"--kv-cache-dtype bf16 .* --fp8rl-kv-cache int8"):
        arguments.before_resolution({"kv_cache_dtype": "bf16"}, int8)
    monkeypatch.setattr(backends, "capability", lambda: HOPPER)
    for kv_cache in ("int8", "e4m3"):
        told = arguments.before_resolution(given, Fp8RLServerArgs(kv_cache=kv_cache))
        assert told["decode_attention_backend"] == TRTLLM_MHA
    monkeypatch.setattr(backends, "capability", lambda: ADA)
    with pytest.raises(ValueError, match=r"int8 .*--fp8rl-kv-cache e4m3"):
        arguments.before_resolution(given, int8)


def test_a_file_of_scales_is_looked_for_before_anything_starts(start: Start) -> None:
    settings = resolved(start.made(kv_cache_dtype="fp8_e4m3"))
    arguments.refuse_kv_cache(settings, Fp8RLServerArgs())
    with pytest.raises(ValueError, match=r"/absent\.json"):
        arguments.refuse_kv_cache(settings, Fp8RLServerArgs(kv_scales="/absent.json"))


# -- in the process that serves


class Registry:
    """SGLang's, as far as it is used."""

    def __init__(self, lacks: str = "") -> None:
        self.hooks: dict[str, Any] = {}
        self._lacks = lacks

    def _apply_target(self, target: str, around: list[tuple[Any, Any, Any]]) -> None:
        assert target not in self.hooks, "wrapped twice"
        if target == self._lacks:
            raise AttributeError(target)
        ((_, hook, _),) = around
        self.hooks[target] = hook

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> "Registry":
        """Stand in SGLang's place; returns itself."""
        monkeypatch.setitem(compat.__dict__, "HookRegistry", self)
        monkeypatch.setitem(compat.__dict__, "HookType", SimpleNamespace(AROUND="around"))
        monkeypatch.setattr(wrapping, "_wrapped", set())
        return self


@pytest.mark.parametrize(
    ("prefill", "decode", "extend_hook", "decode_hook"),
    [
        ("flashinfer", TRTLLM_MHA, "FlashInferAttn.folded", "TRTLLMHAAttn.paged"),
        ("flashinfer", "flashinfer", "FlashInferAttn.folded", "FlashInferAttn.folded"),
        (FA3, TRTLLM_MHA, "FlashAttention.fa3", "TRTLLMHAAttn.paged"),
        ("torch_native", "torch_native", "TorchNativeAttn.folded", "TorchNativeAttn.folded"),
    ],
)
def test_what_serves_is_wrapped_once(
    prefill: str, decode: str, extend_hook: str, decode_hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of SGLang, and which of our ways is around its method."""
    registry = Registry().replace(monkeypatch)
    for _ in "twice":
        hooks.wrap_attention(prefill, decode, nn.Module())
    wrapped = {".".join(t.split(".")[-2:]): hook for t, hook in registry.hooks.items()}
    expected = {}
    for phase, named in (("extend", extend_hook), ("decode", decode_hook)):
        owner, way = named.split(".")
        expected[f"{owner}Backend.forward_{phase}"] = getattr(kv_attention, f"{way}_{phase}")
    assert wrapped == expected


def test_every_backend_has_a_class_and_the_hooks_of_the_phases_that_it_serves() -> None:
    assert backends.BACKENDS.keys() == kv_attention.HOOKS.keys() == compat.ATTENTION_BACKENDS.keys()
    named = compat.ATTRIBUTES
    for name, row in backends.BACKENDS.items():
        around = kv_attention.HOOKS[name]
        used = named[compat.ATTENTION_BACKENDS[name]].split()
        for phase, serves in (("extend", row.prefill), ("decode", row.decode)):
            is_wrapped = serves is not None
            assert is_wrapped is (phase in around)
            assert is_wrapped is (f"forward_{phase}" in used)  # so that doctor looks for it


def test_the_models_own_modules_are_wrapped_where_our_kernel_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, model = Registry().replace(monkeypatch), nn.Module()
    prepared: list[nn.Module] = []

    def mark(module: nn.Module) -> set[str]:
        prepared.append(module)
        return {"a.Module.forward"}

    monkeypatch.setattr(hooks, "mark", mark)
    hooks.wrap_attention("flashinfer", "flashinfer", model)
    assert prepared == [] and "a.Module.forward" not in registry.hooks
    hooks.wrap_attention("flashinfer", TRTLLM_MHA, model)
    assert prepared == [model]
    assert registry.hooks["a.Module.forward"] is hooks.fused_forward


def test_plans_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry().replace(monkeypatch)
    for _ in "twice":
        hooks.wrap_plans()
    assert registry.hooks == dict.fromkeys(compat.FLASHINFER_PLANS, wait_for_copy)


def test_a_backend_that_cannot_be_wrapped_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = f"{compat.ATTENTION_BACKENDS[TRTLLM_MHA]}.forward_decode"
    Registry(lacks=decode).replace(monkeypatch)
    with pytest.raises(compat.IncompatibleSGLangError, match=f"wrap {decode}"):
        hooks.wrap_attention("flashinfer", TRTLLM_MHA, nn.Module())
