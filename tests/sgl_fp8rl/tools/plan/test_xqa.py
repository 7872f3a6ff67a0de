"""XQA's part of the memory's speed, by sequences."""

import pytest

from sgl_fp8rl.tools.plan import xqa

SHARES = {"ours": [(1, 0.2), (4, 0.6), (64, 1.0)]}


@pytest.mark.parametrize(
    ("batch", "share"), [(1, 0.2), (2, 0.4), (4, 0.6), (16, 0.8), (64, 1.0), (512, 1.0)]
)
def test_share(batch: int, share: float) -> None:
    assert xqa.share(SHARES, "ours", batch) == pytest.approx(share)
