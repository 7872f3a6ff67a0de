"""What a trainer decided to commit, for a second try where not every engine has it."""

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy


class CommitDecision(NamedTuple):
    """An update that is to commit, as it was decided at the first try."""

    policy: Policy
    transaction: str
    """Engines know it by this name."""
    digests: tuple[str, ...] = ()
    """Of the weights of each rank, where an engine missed it and they are known."""

    def check_same(self, digests: Iterable[str]) -> None:
        """Check that a second try brings what the first one brought.

        Args:
            digests: of the weights of each rank; "" where unknown.

        Raises:
            ManifestError: it brings something else.
        """
        found = tuple(digests)
        if "" not in found and found != self.digests:
            raise ManifestError(
                f"the weights or KV scales have changed since an earlier try at {self.policy}, "
                f"which engines have committed; update all of them to a newer version"
            )


def decision_on(policy: Policy, known: Iterable[CommitDecision | None]) -> CommitDecision:
    """That of an earlier try, or a new one.

    Args:
        known: the last decision about each engine.
    """
    earlier = next((d for d in known if d is not None and d.policy == policy), None)
    return earlier or CommitDecision(policy, secrets.token_hex(16))
