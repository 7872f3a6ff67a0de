"""The client over a Ray actor, with a Ray that only calls; tests/integrations has a real one."""

import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer_bridge.engines.engine_client import CONTROL_TIMEOUT_S, EngineError, connect
from trainer_bridge.transport.ray_actor import RayEngine


class RayError(Exception):
    """As Ray's; a task's error holds what the task raised."""

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        if cause is not None:
            self.cause = cause


class Actor:
    """An actor whose only method fails or echoes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.fp8rl_control = SimpleNamespace(remote=lambda message: (message, error))


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(sent: tuple[dict[str, Any], Exception | None], timeout: float) -> dict[str, Any]:
        message, error = sent
        assert timeout == message.get("within", CONTROL_TIMEOUT_S)
        if error is not None:
            raise error
        return {"echo": message}

    ray = ModuleType("ray")
    ray.get, ray.exceptions = get, SimpleNamespace(RayError=RayError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_message_gets_its_reply() -> None:
    engine = RayEngine(Actor())
    assert connect(engine) is engine
    assert engine.control({"op": "layout"}) == {"echo": {"op": "layout"}}
    assert engine.control({"within": 3.0}, 3.0) == {"echo": {"within": 3.0}}
    with pytest.raises(EngineError):
        engine.sample([{}])


def test_a_refusal_arrives_as_it_was_raised() -> None:
    refusal = pickle.loads(pickle.dumps(EngineError("quarantined", 503)))  # Ray pickles it
    with pytest.raises(EngineError) as found:
        RayEngine(Actor(RayError("task failed", refusal))).control({})
    assert (str(found.value), found.value.status) == ("quarantined", 503)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (RayError("the actor died"), "the actor died"),
        (RayError("task failed", KeyError("lost")), "lost"),
    ],
)
def test_any_other_failure_is_an_engine_error_too(error: Exception, word: str) -> None:
    with pytest.raises(EngineError, match=word) as found:
        RayEngine(Actor(error)).control({})
    assert found.value.status is None


def test_a_mistake_is_not_hidden() -> None:
    with pytest.raises(AttributeError):
        RayEngine(object()).control({})


def test_its_import_needs_no_ray() -> None:
    code = "import sys, trainer_bridge.transport.ray_actor; assert 'ray' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
