"""What SGLang is told before it resolves its arguments, and what is decided on what it resolved.

On each device, with the records of the installed SGLang, and as they arrive in a scheduler.
"""

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.server_args import prepare_server_args

import sgl_fp8rl
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat, plugin
from sgl_fp8rl.engine.attention import backends
from sgl_fp8rl.engine.attention.backends import TRTLLM_MHA
from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.engine.startup import activate
from sgl_fp8rl.options import current_options
from tests.gpu import one_gpu
from tests.sgl_fp8rl.resolving import ADA, BLACKWELL, DENSE, EXPERTS, HOPPER, QUANTIZED, Start

Device = tuple[int, int] | None
FP8_KV = {"kv_cache_dtype": "fp8_e4m3"}
KV_FLAGS = ("--kv-cache-dtype", "fp8_e4m3")
OURS_ON_HOPPER = {
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": TRTLLM_MHA,
    "page_size": 64,
}
"""What an FP8 KV cache needs there."""
TRITON = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}
AUTO = dict.fromkeys(TRITON, "auto")


def attributes(settings: Any, names: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


# -- before SGLang resolves


TOLD: list[tuple[Device, tuple[str, ...], dict[str, Any]]] = [
    (HOPPER, (), {"attention_backend": "fa3", "page_size": 1, **AUTO}),
    (HOPPER, KV_FLAGS, {**OURS_ON_HOPPER, **FP8_KV}),
    (HOPPER, (*KV_FLAGS, "--decode-attention-backend", "flashinfer"), {"page_size": 1}),
    (ADA, (), AUTO),
    (ADA, KV_FLAGS, {"attention_backend": "flashinfer", "page_size": 1}),
    (BLACKWELL, (), TRITON),
    (BLACKWELL, KV_FLAGS, {"decode_attention_backend": "flashinfer", **TRITON}),
    (
        BLACKWELL,
        ("--fp8-gemm-backend", "flashinfer_cutlass"),
        TRITON | {"fp8_gemm_runner_backend": "flashinfer_cutlass"},
    ),
    (None, (), {"attention_backend": "torch_native", "device": "cpu", **AUTO}),
    (None, KV_FLAGS, {"attention_backend": "torch_native", **FP8_KV}),
    (None, ("--load-format", "dummy"), {"skip_server_warmup": True}),
    (None, ("--load-form", "dummy"), {"skip_server_warmup": True}),  # as SGLang's parser has it
]


@pytest.mark.parametrize(("device", "argv", "expected"), TOLD)
def test_a_command_line_and_a_file_of_arguments_become_settings(
    start: Start, tmp_path: Path, device: Device, argv: tuple[str, ...], expected: dict[str, Any]
) -> None:
    start.on(device)
    settings = resolved(start.published(start.flags(*argv)))
    assert attributes(settings, expected) == expected
    if "--load-form" in argv:
        return  # a file has whole names
    file = tmp_path / "arguments.yaml"
    lines = dict(zip(argv[::2], argv[1::2], strict=True))
    lines |= {"--quantization": "fp8rl", "--fp8rl-bucket-bytes": "1MiB"}
    file.write_text("".join(f"{flag[2:]}: {value}\n" for flag, value in lines.items()))
    settings = resolved(start.flags("--config", str(file)))
    assert attributes(settings, expected) == expected
    assert current_options().bucket_bytes == 1 << 20


def test_the_command_that_sglang_tells_has_no_key(start: Start, tmp_path: Path) -> None:
    """``/server_info`` of SGLang 0.5.23 asks for no key."""
    file = tmp_path / "arguments.yaml"
    file.write_text("fp8rl-key: s3cret'x\n")
    given = (["--fp8rl-key", "s3cret'x"], ["--fp8rl-ke=s3cret'x"], ["--config", str(file)])
    for flags in given:
        argv = ["--model-path", start.model, "--quantization", NAME, *flags]
        record = prepare_server_args(argv)
        assert plugin.see_engine(lambda *_, role: role, record, role="tokenizer") == "tokenizer"
        assert current_options().key == "s3cret'x"
        told = str(vars(record).get("_launch_command", f"--model-path {start.model}"))
        assert "s3cret" not in told
        assert f"--model-path {start.model}" in told


def test_keywords_become_the_same_settings(start: Start) -> None:
    start.on(HOPPER)
    given = {"model_path": start.model, "quantization": "fp8rl", **FP8_KV}
    settings = resolved(plugin.parse_engine_kwargs(**given))
    assert attributes(settings, OURS_ON_HOPPER) == OURS_ON_HOPPER


@pytest.mark.parametrize("quantization", ["fp8", None])
def test_other_engines_are_told_nothing(start: Start, quantization: str | None) -> None:
    """Nor is anything of theirs resolved here."""
    start.on(BLACKWELL)
    given = {"model_path": start.model, "quantization": quantization, **FP8_KV}
    ours, stock = plugin.parse_engine_kwargs(**given), compat.ServerArgs(**given)
    names = (*backends.ARGUMENTS, *TRITON, "skip_server_warmup")
    assert attributes(ours, names) == attributes(stock, names)
    assert getattr(ours, "_resolution_finished", False) is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*KV_FLAGS, "--attention-backend", "fa3"), "fa3.*decode.*flashinfer"),
        (("--fp8rl-listen", "any"), "needs a key"),
        (("--smg-grpc-mode",), "--smg-grpc-mode True.*no control route"),
    ],
)
def test_a_refused_command_line_ends_with_a_sentence(
    start: Start, argv: tuple[str, ...], message: str
) -> None:
    start.on(HOPPER)
    with pytest.raises(SystemExit, match=f"sgl-fp8rl: .*{message}"):
        start.flags(*argv)


def test_an_unknown_flag_of_ours_ends_the_server(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start.flags("--fp8rl-bukcet-bytes", "1MiB")
    assert "--fp8rl-bukcet-bytes" in capsys.readouterr().err


# -- as SGLang resolved them, in a scheduler


def admitted(start: Start, **fields: Any) -> bool:
    """Whether a scheduler starts whose arguments a framework made.

    Raises:
        ValueError: it does not.
    """
    started: list[Any] = []
    model = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)))
    server_args = start.published(start.made(**fields))
    with mock.patch.object(activate.compat, "check_live"):  # tests/engine has whole engines
        activate.check_scheduler_args(lambda *given: started.append(given), model, server_args)
    return started == [(model, server_args)]


FULL = {"prefill": {"backend": "full"}}
SCALED = {**FP8_KV, **OURS_ON_HOPPER, "attention_backend": "fa3"}
"""What a framework has to say on Hopper."""


DETERMINISTIC, ON_POLICY = {"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}


@pytest.mark.parametrize("model", [DENSE, EXPERTS, QUANTIZED], ids=["dense", "experts", "fp8"])
@pytest.mark.parametrize("device", [HOPPER, ADA, BLACKWELL, None])
def test_defaults_are_admitted_and_keep_our_quantization(
    start: Start, device: Device, model: dict[str, Any]
) -> None:
    start.on(device)
    given = {"model_path": start.checkpoint(model)}
    assert admitted(start, **given)
    assert resolved(start.made(**given)).quantization == "fp8rl"


@pytest.mark.parametrize("device", [HOPPER, ADA, BLACKWELL, None])
def test_our_own_choice_for_an_fp8_kv_cache_is_admitted(start: Start, device: Device) -> None:
    start.on(device)
    assert admitted(start, **FP8_KV, **backends.choose({}, device))


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        # what resolution decides where nobody said anything
        (HOPPER, {"attention_backend": None, "page_size": None}, None),
        (HOPPER, dict.fromkeys(SCALED) | FP8_KV, "fa3.*decode"),
        (BLACKWELL, dict.fromkeys(SCALED) | FP8_KV, f"{TRTLLM_MHA}.*prefill"),
        (ADA, dict.fromkeys(SCALED) | FP8_KV, None),
        (HOPPER, {"attention_backend": "triton", "prefill_attention_backend": None}, "triton"),
        (HOPPER, {"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2.*--kv-cache-dtype fp8_e4m3"),
        # in each way to say it
        *(
            (HOPPER, way, "prefill full.*breakable")
            for way in (
                {"cuda_graph_backend_prefill": "full"},
                {"cuda_graph_config": FULL},
                {"cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend="full"))},
            )
        ),
        (HOPPER, {"cuda_graph_backend_prefill": "breakable"}, None),
        (HOPPER, {"cuda_graph_backend_prefill": "disabled"}, None),
        (HOPPER, {"cuda_graph_backend_prefill": "full", "kv_cache_dtype": "auto"}, None),
        (HOPPER, {"page_size": 32}, None),
        (HOPPER, {"smg_grpc_mode": True}, "no control route"),
        (HOPPER, {"grpc_mode": True}, "no control route"),
        (HOPPER, {"dcp_size": 2, "tp_size": 2}, "--dcp-size 2"),
        (HOPPER, {"attn_cp_size": 2, "tp_size": 2}, "--attn-cp-size 2"),
        (HOPPER, DETERMINISTIC, "--decode-attention-backend flashinfer"),
        (HOPPER, ON_POLICY, "--decode-attention-backend flashinfer"),
        (HOPPER, DETERMINISTIC | {"decode_attention_backend": "flashinfer"}, None),
        (HOPPER, ON_POLICY | {"decode_attention_backend": "flashinfer"}, None),
    ],
)
def test_what_a_framework_asked_is_checked_as_resolved(
    start: Start, device: Device, changes: dict[str, Any], message: str | None
) -> None:
    start.on(device)
    if message is None:
        assert admitted(start, **SCALED | changes)
        return
    with pytest.raises(ValueError, match=message):
        admitted(start, **SCALED | changes)


def test_a_server_in_rust_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "0")
    assert admitted(start)
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ValueError, match=r"SGLANG_RUST_SERVER.*no control route"):
        admitted(start)


# -- where settings are read


RECORDS = {"server_args", "_server_args", "get_server_args"}


BY_NAME = {"getattr", "hasattr", "setattr", "vars"}
READS_THEM = {
    "sgl_fp8rl/engine/compat/settings.py": "for all others",
    "sgl_fp8rl/engine/cpu/cpu_platform.py": "is a step of SGLang's resolution",
}


def reads_of_records(tree: ast.AST) -> list[str]:
    """Where code reads or writes an attribute of SGLang's arguments."""

    def is_record(node: ast.AST) -> bool:
        node = node.func if isinstance(node, ast.Call) else node
        return {getattr(node, "id", None), getattr(node, "attr", None)} & RECORDS != set()

    def is_read(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return is_record(node.value)
        by_name = isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME
        return by_name and is_record(node.args[0])  # type: ignore[attr-defined]

    return [ast.unparse(node) for node in ast.walk(tree) if is_read(node)]


def test_one_module_reads_sglangs_arguments() -> None:
    home = Path(str(sgl_fp8rl.__file__)).parent
    found = {
        str(path.relative_to(home.parent)): reads
        for path in home.rglob("*.py")
        if "doctor" not in path.parts  # ours is a module of that name there
        and (reads := reads_of_records(ast.parse(path.read_text())))
    }
    assert found.keys() == READS_THEM.keys(), json.dumps(found, indent=1)


def test_a_planted_read_is_found() -> None:
    for code in (
        "runner.server_args.page_size",
        "self._server_args.host",
        "server_args.page_size",
        "getattr(server_args, 'page_size', None)",
        "vars(scheduler.server_args)",
        "compat.get_server_args().page_size",
        "server_args.page_size = 1",
    ):
        assert len(reads_of_records(ast.parse(code))) == 1, code


# -- the GPU tests' own server


def test_ranks_can_share_one_gpu(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/gpu/one_gpu.py`` reaches what each process of the engine reads."""
    monkeypatch.setattr(
        compat.ServerArgs, "check_server_args", compat.ServerArgs.check_server_args
    )  # put back at the end
    one_gpu.allow(compat.ServerArgs)
    start.on(HOPPER)
    record = start.made(tp_size=2)
    resolved(record)
    record.check_server_args()
    assert resolved(start.published(record)).gpu_id_step == 0
