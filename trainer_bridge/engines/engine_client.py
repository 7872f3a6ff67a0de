"""One engine, in this process or behind HTTP, reached by the same two calls; or several at once."""

import asyncio
import ipaddress
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache, partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from sgl_fp8rl.protocol.values import excerpt, seconds
from trainer_bridge.engines.http_requests import Answer, Fault, ReplyTooLongError, post_all

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTROL_PATH = "/fp8rl"
CONTROL_TIMEOUT_S = 600.0
"""Longer than the engine lets an update wait for requests in flight."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
LONGEST_ERROR = 1000
"""Characters of an error that are shown."""


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

    def control(
        self, message: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Send one control message (``sgl_fp8rl.engine.control.control``) and return its reply.

        Args:
            timeout_s: seconds to wait for the reply.

        Raises:
            EngineError: the engine refused it, cannot be reached, or gave no reply in time.
        """

    def sample(
        self, requests: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[dict[str, Any] | EngineError]:
        """Send requests for one response each to SGLang's ``/generate``, all at once.

        Args:
            requests: their JSON.
            timeout: seconds; requests that take longer are aborted. None waits.

        Returns:
            A reply for each request, in order; an error where it was refused, as in quarantine, or
            got none.
        """


def server_key() -> str | None:
    """The shared secret of the servers that this trainer updates: the variable ``FP8RL_KEY``."""
    return os.environ.get("FP8RL_KEY")


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
        return HTTPEngine(engine, key or server_key())
    if hasattr(engine, "control"):
        return engine  # type: ignore[no-any-return]
    if hasattr(engine, "fp8rl_control"):
        return InProcessEngine(engine)
    raise EngineError(
        f"{type(engine).__name__} is not an engine; pass an sgl.Engine started "
        f"with quantization='fp8rl', or an http:// address"
    )


def _http_exceptions() -> tuple[Any, ...]:
    """The exception by which an engine of this process refuses a request. The engine has loaded
    FastAPI, which a trainer without an engine may lack."""
    fastapi = sys.modules.get("fastapi")
    return () if fastapi is None else (fastapi.HTTPException,)


class InProcessEngine:
    """An ``sgl.Engine`` of this process. Any number of threads may call."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def control(
        self, message: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            return self._engine.fp8rl_control(message, timeout_s)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError) as error:
            raise EngineError(str(error), getattr(error, "status", None)) from error

    def sample(
        self, requests: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[dict[str, Any] | EngineError]:
        try:
            return self._engine.fp8rl_run(  # type: ignore[no-any-return]
                self._sample_all(requests, timeout)
            )
        except RuntimeError as error:
            if not hasattr(error, "status"):
                raise
            raise EngineError(str(error), error.status) from error

    async def _sample_all(
        self, requests: Sequence[dict[str, Any]], timeout: float | None
    ) -> list[dict[str, Any] | EngineError]:
        tasks = [asyncio.create_task(self._sample(request, timeout)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:  # SGLang aborts what is cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(
        self, request: dict[str, Any], timeout: float | None
    ) -> dict[str, Any] | EngineError:
        arguments = dict(request)
        # Engine.generate has no such argument; its prompts are tokenized here, as it would itself
        wants_prompt_ids = arguments.pop("return_prompt_token_ids", False)
        if "text" in arguments:
            arguments["input_ids"] = self._tokenize(arguments.pop("text"))
        try:
            generation = self._engine.async_generate(**arguments)
            reply: dict[str, Any] = await asyncio.wait_for(generation, timeout)
        except asyncio.TimeoutError:
            return EngineError(f"the engine gave no answer within {timeout:g} s")
        except ValueError as error:
            return EngineError(str(error), 400)  # as SGLang's server answers
        except _http_exceptions() as error:
            return EngineError(str(error.detail), error.status_code)
        if wants_prompt_ids:
            reply["prompt_token_ids"] = arguments["input_ids"]
        return reply

    def _tokenize(self, prompt: str) -> list[int]:
        tokenizer = self._engine.tokenizer_manager.tokenizer
        if tokenizer is None:
            raise EngineError(
                "the engine was started with skip_tokenizer_init; pass prompts as token ids"
            )
        return tokenizer.encode(prompt)  # type: ignore[no-any-return]


class HTTPEngine:
    """A server at an ``http://`` address."""

    def __init__(self, address: str, key: str | None) -> None:
        self.address = normalized(address)
        self.host = urlsplit(self.address).hostname
        """By which this process reaches the engine's host."""
        self._key = key
        if key is not None and self.address.startswith("http:"):
            _note_plain(self.address, self.host)

    def control(
        self, message: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        (reply,) = self._post(CONTROL_PATH, [message], timeout_s)
        if isinstance(reply, EngineError):
            raise reply
        if not isinstance(reply, dict):
            raise EngineError(f"{self.address} answers {excerpt(reply)}; is it an fp8rl server?")
        return reply

    def sample(
        self, requests: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[dict[str, Any] | EngineError]:
        return self._post("/generate", requests, timeout)

    def _post(self, path: str, messages: Sequence[Any], timeout: float | None) -> list[Any]:
        timeout = seconds("timeout", timeout)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        url = self.address + path
        return post_all(url, messages, headers, partial(self._read, url), timeout)

    def _read(self, url: str, answer: Answer | Fault) -> Any:
        """The JSON of a reply, or an EngineError."""
        if isinstance(answer, ReplyTooLongError):
            return EngineError(
                f"{self.address} sends {answer}; sample fewer tokens a request, or see what "
                f"answers there"
            )
        if isinstance(answer, Exception):
            why = " ".join(str(answer)[:200].split())  # may quote a malformed status line
            return EngineError(f"{self.address} cannot be reached ({why}); is it up?")
        status, body = answer
        if status != 200:
            return EngineError(_sentence(url, status, body), status)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            return EngineError(f"{self.address} cannot be reached ({error}); is it up?")


@cache
def _note_plain(address: str, host: str | None) -> None:
    """Warn, once for each address, of a key that a network can read."""
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # a name
        is_here = False
    if not is_here:
        logger.warning(
            "the key of %s is sent over plain HTTP, where others on the network can read it; start "
            "the server with --ssl-keyfile and --ssl-certfile and use https://, or trust the "
            "network",
            address,
        )


def normalized(address: str) -> str:
    """One spelling of an address, whatever its case and with or without what it implies: the
    default port and a slash at the end. Names are not looked up.

    Raises:
        EngineError: it is not an address.
    """
    try:
        parts = urlsplit(address)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address or parts.scheme not in DEFAULT_PORTS:
        raise EngineError(f"{address!r} is not an address; write it as http://host:port")
    host = parts.netloc.lower().removesuffix(DEFAULT_PORTS[parts.scheme])
    return parts._replace(netloc=host, path=parts.path.rstrip("/")).geturl()


def check_fields(whose: str, reply: dict[str, Any], sound: dict[str, bool]) -> None:
    """Check the fields of a reply that the trainer reads.

    Args:
        sound: by the name of a field, whether its value is one that it may have.
    """
    for name, is_sound in sound.items():
        if not is_sound:
            raise EngineError(
                f"{whose} has {excerpt(reply.get(name))} as its {name}; install the same sgl-fp8rl "
                f"on both sides"
            )


def sentence_of(error: Any) -> str:
    """The ``error`` of a reply: a sentence of the engine, or an excerpt of what stands for one."""
    if isinstance(error, str) and error.strip():
        return error[:LONGEST_ERROR]
    return f"the engine gives {excerpt(error)} as its error; see its log"


def _sentence(url: str, status: int, body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        reply = json.loads(text)
        found = reply.get("error", reply)  # ours is {"error": sentence}, SGLang's has a "message"
        return sentence_of(found["message"] if isinstance(found, dict) else found)
    except (ValueError, LookupError, AttributeError, RecursionError):  # a proxy in between
        return f"{url} answered {status}: {text[:200]}"


def call_all(calls: Sequence[tuple[EngineClient, Callable[[], T]]]) -> list[T | EngineError]:
    """Call all, and wait for the last. An engine of this process is called from this thread.

    Returns:
        what each returned, in order, or its EngineError.
    """
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        others = [
            None
            if len(calls) == 1 or isinstance(client, InProcessEngine)
            else pool.submit(_tried, call)
            for client, call in calls
        ]
        # all others run by now
        mine = [_tried(call) for other, (_, call) in zip(others, calls, strict=True) if not other]
        return [other.result() if other else mine.pop(0) for other in others]


def _tried(call: Callable[[], T]) -> T | EngineError:
    try:
        return call()
    except EngineError as error:
        # without its traceback and its cause: frames that hold the result would be in them, and a
        # cycle keeps the trainer's tensors
        return copy(error)
