"""One engine, in this process or behind HTTP, reached by the same three calls."""

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any, Protocol

CONTROL_PATH = "/fp8rl"
HTTP_TIMEOUT_S = 600.0
"""Seconds; a rollout of long responses is one request."""


class EngineError(RuntimeError):
    """The engine refused a request, or cannot be reached.

    Args:
        message: one sentence: what, where, what to do.
        status: as the attribute.
    """

    status: int | None
    """The HTTP status, if there is one; 503 in quarantine."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineClient(Protocol):
    """What the bridge needs of an engine."""

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one control message (``sgl_fp8rl.engine.control``) and return its reply.

        Raises:
            EngineError: the engine refused it or cannot be reached.
        """

    def generate(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """SGLang's ``/generate``: one dict a response, in order.

        Raises:
            EngineError: the engine refused a request, as it does in quarantine.
        """

    def close(self) -> None:
        """Let go of what the client holds; the engine itself goes on."""


def connect(engine: Any, key: str | None = None) -> EngineClient:
    """Make a client of an engine.

    Args:
        engine: an ``sgl.Engine`` of this process, an ``http://`` address, or a client.
        key: the server's shared secret; default the variable ``FP8RL_KEY``.

    Returns:
        The client; ``engine`` itself if it is one.

    Raises:
        EngineError: it is none of these, or an ``sgl.Engine`` without the plugin.
    """
    if isinstance(engine, str):
        return HTTPEngine(engine, key or os.environ.get("FP8RL_KEY"))
    if hasattr(engine, "control") and hasattr(engine, "generate"):
        return engine  # type: ignore[no-any-return]
    if hasattr(engine, "fp8rl_control"):
        return InProcessEngine(engine)
    raise EngineError(
        f"{type(engine).__name__} is not an engine; pass an sgl.Engine started "
        f"with quantization='fp8rl', or an http:// address"
    )


class InProcessEngine:
    """An ``sgl.Engine`` of this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._engine.fp8rl_control(message)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError) as error:
            raise EngineError(str(error), getattr(error, "status", None)) from error

    def generate(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        arguments = dict(payload)
        # Engine.generate has no such argument; its prompts are tokenized here, as it would itself
        wants_prompt_ids = arguments.pop("return_prompt_token_ids", False)
        if "text" in arguments:
            arguments["input_ids"] = self._tokenize(arguments.pop("text"))
        try:
            replies = self._engine.generate(**arguments)
        except Exception as error:
            # FastAPI's HTTPException, a class that the trainer's environment need not have
            status = getattr(error, "status_code", None)
            if status is None:
                raise
            raise EngineError(str(getattr(error, "detail", error)), int(status)) from error
        replies = replies if isinstance(replies, list) else [replies]
        if wants_prompt_ids:
            for prompt, reply in zip(arguments["input_ids"], replies, strict=True):
                reply["prompt_token_ids"] = prompt
        return replies

    def _tokenize(self, prompts: list[str]) -> list[list[int]]:
        tokenizer = self._engine.tokenizer_manager.tokenizer
        if tokenizer is None:
            raise EngineError(
                "the engine was started with skip_tokenizer_init; pass prompts as token ids"
            )
        return [tokenizer.encode(prompt) for prompt in prompts]

    def close(self) -> None:
        """Nothing is held."""


class HTTPEngine:
    """A server at an ``http://`` address."""

    def __init__(self, address: str, key: str | None) -> None:
        if not address.startswith(("http://", "https://")):
            raise EngineError(f"{address!r} is not an address; write it as http://host:port")
        self.address = address.rstrip("/")
        self._key = key

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._post(CONTROL_PATH, message)  # type: ignore[no-any-return]

    def generate(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        replies = self._post("/generate", payload)
        return replies if isinstance(replies, list) else [replies]

    def close(self) -> None:
        """Nothing is held: each request has its own connection."""

    def _post(self, path: str, message: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            self.address + path, json.dumps(message).encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise EngineError(_sentence(error), error.code) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"{self.address} cannot be reached ({error}); is it up?") from error


def _sentence(error: urllib.error.HTTPError) -> str:
    body = error.read().decode(errors="replace")
    try:
        reply = json.loads(body)
        found = reply.get("error", reply)  # ours is {"error": sentence}, SGLang's has a "message"
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, LookupError, TypeError, AttributeError):  # a proxy in between
        return f"{error.url} answered {error.code}: {body[:200]}"
