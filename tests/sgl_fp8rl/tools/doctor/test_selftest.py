"""The weight whose codes are known exactly."""

import numpy as np
import torch

from sgl_fp8rl.tools.doctor import selftest
from tests import oracle


def test_known_weight_is_exact_in_bf16() -> None:
    weight = torch.from_numpy(selftest.known_weight())
    assert torch.equal(weight.to(torch.bfloat16).double(), weight)


def test_nearest_e4m3_against_the_table_of_all_codes() -> None:
    middles = (oracle.E4M3[:126] + oracle.E4M3[1:127]) / 2
    values = np.concatenate([oracle.E4M3[:127], middles, np.nextafter(middles, 1e9), [1e6]])
    values = np.concatenate([values, np.nextafter(middles, -1e9)])
    values = np.concatenate([values, -values])
    expected = oracle.E4M3[oracle.encode(values)]
    assert np.array_equal(selftest.nearest_e4m3(values), expected)
