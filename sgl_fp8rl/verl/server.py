"""verl's SGLang server as an fp8rl server: its start, its control channel, its token versions."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from verl.workers.rollout.sglang_rollout import async_sglang_server as stock

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention.backends import check_dtype
from sgl_fp8rl.engine.control import control_route
from sgl_fp8rl.engine.control.control import Control
from sgl_fp8rl.engine.control.guards import VERSION_KEY
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError
from sgl_fp8rl.engine.plugin import parse_engine_kwargs
from sgl_fp8rl.options import current_options
from sgl_fp8rl.verl.rollout_config import check, hand_over
from trainer_bridge.engines.engine_client import EngineError

VERSIONS = "policy_versions"
"""Where ``TokenOutput.extra_fields`` carries the policy version of each token."""


class Server(stock.SGLangHttpServer):  # type: ignore[misc]
    """One fp8rl engine in a Ray actor.

    Raises:
        ValueError: the configuration asks for what it cannot do.
    """

    tokenizer_manager: Any

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        check(self.config)
        hand_over(self.config)
        self._control: Control | None = None
        self._steps: dict[int, int | None] = {}

    async def launch_server(self, *args: Any, **keywords: Any) -> None:
        """Start the engine; ``engine_kwargs.sglang`` takes the keywords of an fp8rl ``Engine``."""
        compat.load_plugins()  # else SGLang knows no quantization of that name
        given = self.config.engine_kwargs["sglang"]
        with _our_arguments(given.get("attention_backend")):
            await super().launch_server(*args, **keywords)
        manager = self.tokenizer_manager
        # verl calls the third value of SGLang's _launch_subprocesses, its ports, scheduler_info
        self._control = control_route.serve(manager.server_args, manager, self.scheduler_info)
        self.tokenizer_manager = _Recording(manager)

    async def fp8rl_control(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer one control message of ``trainer_bridge``.

        Raises:
            EngineError: it is refused, or the server has not started.
        """
        if self._control is None:
            raise EngineError("the server has not started; wait for launch_server", 503)
        try:
            # shielded: a trainer that dies must not leave a reply of the schedulers unread
            return await asyncio.shield(self._control.handle(message))
        except ControlError as error:
            raise EngineError(str(error), error.status) from None

    async def fp8rl_note_step(self, version: int, step: int | None) -> None:
        """Say which of verl's steps a policy version is, before it serves."""
        self._steps[version] = step

    async def generate(self, *args: Any, **keywords: Any) -> Any:
        """As verl's; its ``extra_fields`` say which policy sampled each token, and which steps.

        Raises:
            EngineError: the engine refuses it, as in quarantine.
            RuntimeError: the engine returned tokens without the versions that sampled them.
        """
        meta: dict[str, Any] = {}
        token = _meta.set(meta)
        try:
            output = await super().generate(*args, **keywords)
        except HTTPException as error:  # Ray cannot pickle it
            raise EngineError(str(error.detail), error.status_code) from None
        finally:
            _meta.reset(token)
        return self._with_versions(output, meta)

    def _with_versions(self, output: Any, meta: dict[str, Any]) -> Any:
        versions = list(meta.get(VERSION_KEY) or [])
        if len(versions) != len(output.token_ids):
            if versions or output.stop_reason != "abort":
                raise RuntimeError(
                    f"SGLang returned {len(output.token_ids)} tokens and {len(versions)} policy "
                    f"versions; report it with the engine's version and options"
                )
            # aborted while it waited again: tokens of an unknown policy are useless
            output.token_ids = []
            output.log_probs = None if output.log_probs is None else []
        fields = output.extra_fields
        fields[VERSIONS] = versions
        steps = [step for v in versions if (step := self._steps.get(v)) is not None]
        if steps:
            fields["global_steps"] = fields["max_global_steps"] = max(steps)
            fields["min_global_steps"] = min(steps)
        return output


_meta: ContextVar[dict[str, Any] | None] = ContextVar("meta", default=None)


class _Recording:
    """SGLang's tokenizer manager, as verl's ``generate`` sees it: replies leave their meta_info,
    which verl drops, to the call of ``Server.generate`` that awaits them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *args: Any, **keywords: Any) -> AsyncIterator[Any]:
        async for reply in self._manager.generate_request(*args, **keywords):
            if (meta := _meta.get()) is not None:
                meta.update(reply["meta_info"])
            yield reply


@contextmanager
def _our_arguments(backend: str | None) -> Iterator[None]:
    """Let verl make SGLang's ``ServerArgs`` by the parser of an fp8rl ``Engine``.

    Args:
        backend: the attention backend that the user chose, if any; verl always passes one.
    """

    class Arguments(compat.ServerArgs):  # type: ignore[misc]
        def __new__(cls, **given: Any) -> Any:
            # a trainer's update restores what a release lost: a copy in host memory is waste
            given["enable_weights_cpu_backup"] = False
            kv_cache = given.get("fp8rl_kv_cache", current_options().kv_cache)
            if kv_cache is not None or check_dtype(given.get("kv_cache_dtype")):
                given["attention_backend"] = backend  # that of an 8-bit KV cache is selected
            return parse_engine_kwargs(**given)

    original, stock.ServerArgs = stock.ServerArgs, Arguments
    try:
        yield
    finally:
        stock.ServerArgs = original
