"""The reproducer of docs/fp8_attention_upstream.md, with attention in the place of its kernels."""

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
