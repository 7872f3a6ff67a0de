"""Which layers a pattern names."""

import pytest

from server_args import Fp8RLServerArgs, matches

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


def test_is_ignored_asks_every_pattern() -> None:
    args = Fp8RLServerArgs(ignored_layers=("lm_head", r"re:\.10\."))
    assert args.is_ignored(NAME)
    assert args.is_ignored("lm_head")
    assert not args.is_ignored("model.layers.11.mlp.down_proj")
    assert not Fp8RLServerArgs().is_ignored(NAME)
