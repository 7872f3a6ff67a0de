"""What SGLang's own requests may do to an fp8rl engine, and who may send control messages."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput, CheckWeightsReqInput
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control import attached, control_route, guards
from sgl_fp8rl.engine.control.control import IsGone
from sgl_fp8rl.receiver.engine_weights import EngineWeights

DONE = object()


def engine(quantization: str = "fp8rl") -> Any:
    """Stands for SGLang's scheduler and for its weight updater."""
    model = nn.Linear(2, 2)
    if quantization == "fp8rl":
        attached.attach(model, EngineWeights(model, torch.bfloat16))
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))


def original(updater: Any, request: Any) -> Any:
    return DONE


@pytest.mark.guarantee("no-bypass", fault="a method of SGLang's weight updater that is not known")
def test_each_way_to_change_weights_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.unknown_updates() == []
    updater = compat._look_up(compat._target_path(compat.UPDATER))
    monkeypatch.setattr(updater, "swap_weights", original, raising=False)
    assert compat.unknown_updates() == ["swap_weights"]


@pytest.mark.guarantee("no-bypass", fault="SGLang's own weight updates")
def test_what_changes_weights_or_outlives_an_update_is_refused() -> None:
    """SGLang's ``reset_tensors`` writes random numbers, also to what no update brings."""
    updates = compat.stock_updates()
    assert compat.STOCK_UPDATES.items() <= updates.items()
    told = "trainer_bridge.update"
    resets = [CheckWeightsReqInput(action=action) for action in ("reset_tensors", "new")]
    storage = AttachHiCacheStorageReqInput(hicache_storage_backend="file")
    refused: list[tuple[Any, Any, str, str]] = [
        *((guards.refuse_stock_update(name), None, name, told) for name in updates.values()),
        *((guards.refuse_reset, reset, "CheckWeightsReqOutput", told) for reset in resets),
        (guards.refuse_kv_storage, storage, "AttachHiCacheStorageReqOutput", "HiCache"),
    ]
    for hook, request, output, why in refused:
        assert hook(original, engine("fp8"), request) is DONE
        answer = hook(original, engine(), request)
        assert type(answer).__name__ == output
        assert not answer.success and why in answer.message
    for action in ("snapshot", "compare", "checksum"):  # which only read
        asked = CheckWeightsReqInput(action=action)
        assert guards.refuse_reset(original, engine(), asked) is DONE


# ---- who may send control messages


class Control:
    """Answers the one message that is sent here."""

    def __init__(self, options: Fp8RLServerArgs) -> None:
        self.options = options

    async def handle(self, message: Any, is_gone: IsGone) -> dict[str, Any]:
        assert message == {"op": "layout"}
        return {"version": 3}


def status(
    given: str | None,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> int:
    """HTTP status of a control message to a server with these keys."""
    app, control = FastAPI(), Control(Fp8RLServerArgs(**options))
    app.add_api_route(control_route.PATH, control_route._handler(control), methods=["POST"])  # type: ignore[arg-type]
    if api_key or admin_api_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    header = {} if given is None else {"Authorization": f"Bearer {given}"}
    header |= headers or {}
    client = TestClient(app, client=("127.0.0.1", 50000))
    reply = client.post(control_route.PATH, content=json.dumps({"op": "layout"}), headers=header)
    assert (reply.status_code == 200) == (reply.json() == {"version": 3})
    return reply.status_code


@pytest.mark.parametrize(
    ("keys", "opens"),
    [
        ({}, None),
        ({"api_key": "api"}, "api"),
        ({"admin_api_key": "admin"}, "admin"),
        ({"api_key": "api", "admin_api_key": "admin"}, "admin"),
        ({"key": "ours"}, "ours"),
        ({"key": "admin", "admin_api_key": "admin"}, "admin"),
    ],
)
def test_the_rule_of_sglangs_admin_routes_holds(keys: dict[str, str], opens: str | None) -> None:
    for given in (None, "api", "admin", "ours"):
        expected = 200 if opens in (None, given) else 401
        assert status(given, **keys) == expected


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_page_in_a_browser_of_this_host_is_refused(kind: str) -> None:
    """It may post such bodies to any address without asking; curl says no origin."""
    assert status(None, headers={"Content-Type": kind}) == 200
    assert status(None, headers={"Content-Type": kind, "Origin": "http://a.page"}) == 403
    assert status(None, headers={"Content-Type": kind, "Origin": "null"}) == 403


@pytest.mark.filterwarnings("ignore")
def test_every_guarded_route_is_on_the_page() -> None:
    """docs/security.md names every route of SGLang that an administrator's key guards."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel

    page = Path(__file__).parents[3] / "docs" / "security.md"
    guarded = {
        route.path  # type: ignore[attr-defined]
        for route in app.routes
        if getattr(getattr(route, "endpoint", None), "_auth_level", None) in list(AuthLevel)
    }
    assert len(guarded) > 20
    named = set(re.findall(r"`(?:PUT )?(/[^` ]+)`", page.read_text()))
    assert not guarded - named - {"/fp8rl"}
