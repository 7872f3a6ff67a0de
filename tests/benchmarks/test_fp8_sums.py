"""The reproducer of docs/fp8_attention_upstream.md, with attention in the place of its kernels."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kv import fp8_sums


@pytest.mark.parametrize(
    "case", [fp8_sums.Case(2, 64, 1.0), fp8_sums.Case(2, 64, 0.3, 0.0, queries=5)], ids=str
)
def test_the_oracle_of_the_reproducer_is_attention(case: fp8_sums.Case) -> None:
    drawn, n = fp8_sums.draw(case, "cpu"), case.queries
    q = drawn.q.double().view(2, n, fp8_sums.HEADS * fp8_sums.GROUP, fp8_sums.DIM)
    k, v = (
        x.double().view(2, 64, fp8_sums.HEADS, fp8_sums.DIM).repeat_interleave(4, 2)
        for x in (drawn.k, drawn.v)
    )
    seen = torch.ones(n, 64, dtype=torch.bool).tril(64 - n)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen
    )
    wanted = wanted.transpose(1, 2).reshape(2 * n, -1, fp8_sums.DIM)
    assert fp8_sums.error(fp8_sums.oracle(drawn), wanted) < 1e-12
    assert fp8_sums.bias(wanted * 0.9, wanted) == pytest.approx(-0.1)
    assert abs(v.mean() - case.v_mean) < 0.05


def paged_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor, n: int
) -> torch.Tensor:
    """Of pages with heads before tokens, for the last ``n`` queries of each sequence."""
    k, v = (pages[table].transpose(2, 3).flatten(0, 2) for pages in (k_pages, v_pages))
    case = fp8_sums.Case(len(table), table.shape[1] * k_pages.shape[2], 0.0, queries=n)
    return fp8_sums.oracle(fp8_sums.Inputs(case, q, k, v)).float()


def test_the_reproducer_calls_xqa_with_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = pytest.importorskip("flashinfer.decode")

    def xqa(
        q: Any, k: Any, v: Any, table: Any, lengths: Any, out: Any, *_: Any, **more: Any
    ) -> None:
        assert lengths.tolist() == [[128], [128]] and more["kv_layout"] == "HND"
        assert (more["q_scale"], more["kv_scale"]) == pytest.approx((1.0, 1.0))
        out.copy_(paged_attention(q[:, 0], k, v, table, 1).unsqueeze(1))

    monkeypatch.setattr(decode, "xqa", xqa)
    monkeypatch.setattr(decode, "get_compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(decode, "get_device_sm_count", lambda _: 132)
    monkeypatch.setattr(decode, "device_support_pdl", lambda _: False)
    monkeypatch.setattr(fp8_sums, "WORKSPACE_BYTES", 9 << 20)
    drawn = fp8_sums.draw(fp8_sums.Case(2, 128, 1.0), "cpu")
    wanted = fp8_sums.oracle(drawn)
    assert fp8_sums.error(fp8_sums.xqa(drawn), wanted) < 0.004  # BF16 outputs


def test_the_reproducer_calls_fa3_with_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fa3(q: Any, k_cache: Any, v_cache: Any, page_table: Any, **more: Any) -> torch.Tensor:
        assert more["causal"] and more["cache_seqlens"].tolist() == [128, 128]
        assert more["cu_seqlens_q"].tolist() == [0, 3, 6] and more["max_seqlen_q"] == 3
        assert q.dtype == k_cache.dtype
        return paged_attention(q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), page_table, 3)

    module = SimpleNamespace(flash_attn_with_kvcache=fa3)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(flash_attn=module))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    drawn = fp8_sums.draw(fp8_sums.Case(2, 128, 1.0, queries=3), "cpu")
    wanted = fp8_sums.oracle(drawn)
    for arm in (fp8_sums.fa3, fp8_sums.fa3_bf16):
        assert fp8_sums.error(arm(drawn), wanted) < 1e-6
