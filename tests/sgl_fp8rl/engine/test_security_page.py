"""docs/security.md names every route of SGLang that an administrator's key guards."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.mark.filterwarnings("ignore")
def test_every_guarded_route_is_on_the_page() -> None:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel

    guarded = {
        route.path  # type: ignore[attr-defined]
        for route in app.routes
        if getattr(getattr(route, "endpoint", None), "_auth_level", None) in list(AuthLevel)
    }
    assert len(guarded) > 20
    named = set(re.findall(r"`(?:PUT )?(/[^` ]+)`", PAGE.read_text()))
    assert not guarded - named - {"/fp8rl"}
