"""One engine, its trainer, its clients and its judge; updates, and what is checked after each."""

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.harness import Server
from tests.gpu.policies import write_checkpoint
from tests.logprob_oracle import Reference
from tests.soak import bridge, resources
from tests.soak.clients import Clients
from tests.soak.judge import Judge, ViolationError
from tests.soak.settings import Setting, draw
from tests.soak.trainer import Trainer
from tests.soak.wire import Wire

IN_FLIGHT = "abort", "finish", "retract"
SILENCE_S = 20.0
"""``--fp8rl-session-timeout-s``: a busy machine must not seem silent."""
PROBE_TOKENS = 8


class Soak:
    """A run. Everything random but the moments comes from ``choose``."""

    def __init__(
        self, setting: Setting, server: Server, judge: Judge, trainer: Trainer, seed: int
    ) -> None:
        self.setting, self.server, self.judge, self.trainer = setting, server, judge, trainer
        self.choose = random.Random(seed)
        self.version = 0
        """The last one that was given to an update."""
        self.policy = 0
        """That the engine has."""
        self.updates = 0
        """Complete ones."""
        self.heals = self.quarantines = 0
        """Complete ones after a fault, and those of them that ended a quarantine."""
        self.step = "the first updates"
        """What is under way, for the report of a failure."""
        self.samples: list[resources.Sample] = []
        self.bytes_of_first_update = self._bytes_of_update()
        self.bytes_of_update = min(self._bytes_of_update() for _ in range(2))
        """That a trainer sends to a rank: the first brings the memory that they share; the second
        on a GPU says where the weights lie, which no later one does."""
        self.clients = Clients(server.address, setting.shape.vocabulary, seed)

    def next_version(self) -> int:
        """A version for an update, whatever becomes of it."""
        self.version += self.choose.randint(1, 3)
        return self.version

    def other_policy(self) -> int:
        """Not the one that the engine has."""
        others = [n for n in range(self.setting.policies) if n != self.policy]
        return self.choose.choice(others)

    def update(self, in_flight: str) -> None:
        """A complete update to another policy, which must be served after it."""
        policy = self.other_policy()
        version = self.next_version()
        bridge.update(self.trainer.become(policy), self.server, version, in_flight)
        self.judge.policies[version], self.policy = policy, policy
        self.check_status(bridge.Status(bridge.SERVING, version, ""), "a complete update")
        self.updates += 1

    def heal(self) -> None:
        """A complete update after a fault; the engine then generates, with its version alone."""
        self.quarantines += bridge.status(self.server).state == bridge.QUARANTINED
        self.update(self.choose.choice(IN_FLIGHT))
        (probe,) = bridge.sample(self.server, [self._prompt()], PROBE_TOKENS)
        if probe.versions != [self.version] * PROBE_TOKENS:
            raise ViolationError(f"after the update to {self.version}: versions {probe.versions}")
        self.judge.check([probe])
        self.heals += 1

    def check(self) -> None:
        """Judge what the clients were given, and look at the resources."""
        self.take()
        if self.server.process.poll() is not None:
            raise ViolationError("the server has ended")
        folder = self.server.log.parent / "tmp"
        pid, device = self.server.process.pid, self.setting.device
        self.samples.append(resources.sample(pid, folder, device, self.updates))

    def take(self) -> list[bridge.Sampled]:
        """What the clients were given since the last call; it is also judged."""
        found = self.clients.take()
        self.judge.check(found)
        return found

    def check_status(self, wanted: bridge.Status, after: str) -> None:
        """The engine's state, version and reason."""
        found = bridge.status(self.server)
        if found != wanted:
            raise ViolationError(f"after {after} the engine is {found}, not {wanted}")

    def check_quarantined(self, reason: str) -> None:
        """The engine generates nothing and says why."""
        found = bridge.status(self.server)
        if found.state != bridge.QUARANTINED or reason not in found.reason:
            raise ViolationError(f"the engine is {found}, not quarantined for {reason!r}")
        try:
            sampled = bridge.sample(self.server, [self._prompt()], 1)
        except bridge.EngineError as error:
            if bridge.is_refusal(error):
                return
            raise
        raise ViolationError(f"a quarantined engine generated {sampled}")

    def post(self, path: str, body: dict[str, Any]) -> None:
        """A request to SGLang's own route, which must succeed."""
        status, reply = self.server.ask(path, json.dumps(body).encode())
        if status != 200:
            raise ViolationError(f"{path} {body} was answered with {status}: {reply}")

    def _prompt(self) -> list[int]:
        return [self.choose.randrange(self.setting.shape.vocabulary) for _ in range(16)]

    def _bytes_of_update(self) -> int:
        with Wire().tapped() as wire:
            self.update("abort")
        return wire.sent


@contextmanager
def running(setting: Setting, seed: int, folder: Path) -> Iterator[Soak]:
    """A server with policy 0, and all that a run needs; the server's log stays in ``folder``."""
    policies = [draw(setting.shape, seed, setting.device) for seed in range(setting.policies)]
    with tempfile.TemporaryDirectory(prefix="soak-") as checkpoints:
        checkpoint = write_checkpoint(setting.shape, policies[0], Path(checkpoints) / "0")
        references = [Reference(checkpoint, policy) for policy in policies]
        judge = Judge(references, setting.token_bound, setting.segment_bound)
        temporary = folder / "tmp"
        temporary.mkdir()
        environment = {"TMPDIR": str(temporary)}
        with setting.start(folder / "server.log", checkpoint, environment, SILENCE_S) as server:
            soak = Soak(setting, server, judge, Trainer(policies), seed)
            try:
                yield soak
            finally:
                soak.clients.close()
