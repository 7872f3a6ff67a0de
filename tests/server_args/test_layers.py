"""Which layers a pattern names."""

import pytest

from server_args import matches

NAME = "model.layers.10.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("down_proj", True),
        ("mlp.down", True),
        ("layers.1", True),  # a substring, as documented
        ("layers.1.", False),
        ("mlp_down", False),
        (".*", False),  # no regex without re:
        ("re:.*", True),
        (r"re:layers\.1\.", False),
        (r"re:layers\.\d+\.mlp", True),  # searched for, not anchored
        (r"re:^layers", False),
        (r"re:down_proj$", True),
    ],
)
def test_matches(pattern: str, expected: bool) -> None:
    assert matches(pattern, NAME) is expected
