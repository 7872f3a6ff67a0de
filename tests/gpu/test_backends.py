"""Every FP8 backend of SGLang that runs on Hopper computes from the storage that updates write."""

from pathlib import Path

import pytest

from tests.gpu.engines import (
    Answers,
    digest_of,
    sha256,
    start_engine,
    start_server,
    storage,
    together,
    update,
)
from tests.gpu.policies import DENSE, MOE, Shape, draw, shared_folder, write_checkpoint

SIZES = [1, 8]
KEYWORDS = {"fp8_gemm_backend": "fp8_gemm_runner_backend"}
"""Where a keyword of ``sgl.Engine`` is not its flag's name."""


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        (DENSE, {"fp8_gemm_backend": "deep_gemm"}),
        (DENSE, {"fp8_gemm_backend": "flashinfer_deepgemm"}),
        (DENSE, {"fp8_gemm_backend": "triton"}),
        (MOE, {"moe_runner_backend": "triton"}),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else next(iter(value.values())),
)
def test_an_update_is_what_a_fresh_engine_has(
    shape: Shape, flags: dict[str, str], tmp_path: Path
) -> None:
    """In storage and in logprobs; the old weights are the control."""
    keywords = {KEYWORDS.get(flag, flag): value for flag, value in flags.items()}
    with shared_folder() as folder:
        checkpoints = [write_checkpoint(shape, draw(shape, n), folder / str(n)) for n in (0, 1)]
        with together(
            lambda: start_server(tmp_path / "updated.log", checkpoints[0], **flags),
            lambda: start_engine(tmp_path / "fresh.log", checkpoints[1], **keywords),
        ) as (server, fresh):
            before, storage_before = Answers.of(server, SIZES), storage(digest_of(server))
            update(server, draw(shape, 1))
            after, wanted = Answers.of(server, SIZES), Answers.of(fresh, SIZES)
            assert sha256(digest_of(server)) == sha256(digest_of(fresh))
            assert storage(digest_of(server)) == storage_before
    assert after.logprobs == wanted.logprobs
    assert before.logprobs != wanted.logprobs
