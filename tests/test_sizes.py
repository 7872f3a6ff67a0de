"""Caps of sizes: what is beyond one is named, and no cap rises by itself."""

from tests import sizes, trace_update


def test_what_is_beyond_its_cap_is_named() -> None:
    caps = {"tests": 10, "docs": 10}
    assert list(sizes.beyond(caps, caps)) == []
    (sentence,) = sizes.beyond({"tests": 9, "docs": 1012}, caps)
    assert sentence.startswith("docs/ has 1,012 words, 1,002 more than its cap")


def test_caps_only_fall() -> None:
    now, caps = {"tests": 901, "docs": 11}, {"tests": 2000, "docs": 10}
    assert sizes.lowered(now, caps) == {"tests": 1000, "docs": 10}


def test_an_update_passes_no_more_files() -> None:
    found = trace_update.files()
    assert {"trainer_bridge/updates", "sgl_fp8rl/receiver"} < found.keys()  # it went all the way
    assert sum(map(len, found.values())) <= trace_update.MOST
