"""What the ranks of a trainer ask for: the same policy, checked before anything happens."""

from collections.abc import Callable
from typing import Any, NamedTuple

from sgl_fp8rl.protocol.manifest import ManifestError, check_in_flight
from sgl_fp8rl.protocol.policy import Policy, check_policy
from sgl_fp8rl.protocol.states import ABORT
from trainer_bridge.arguments import as_python
from trainer_bridge.ranks.rank_values import exchanged


@exchanged
class PolicyRequest(NamedTuple):
    """The policy that one rank asks for, and how."""

    policy: Policy
    in_flight: str
    names_run: bool
    """Whether it names the run; otherwise that is the first rank's."""


def ask(
    check: Callable[[], None], own_run: str, run: Any, version: Any, in_flight: Any = ABORT
) -> PolicyRequest:
    """Checked before an engine is told of anything.

    Args:
        check: raises what is wrong with the weights on this rank.
        own_run: of this process.

    Raises:
        ManifestError: the policy is invalid.
    """
    check()
    policy = check_policy(own_run if run is None else run, as_python(version))
    return PolicyRequest(policy, check_in_flight(in_flight), run is not None)


def agree(ranks: tuple[int, ...], requests: list[PolicyRequest | str]) -> Policy:
    """The policy that all ranks ask for.

    Args:
        requests: of each of them; of one that cannot go on, why.

    Raises:
        ManifestError: a rank cannot, or asks for another policy.
    """
    first, *others = requests
    assert isinstance(first, PolicyRequest)
    for rank, other in zip(ranks[1:], others, strict=True):
        if isinstance(other, str):
            raise ManifestError(other)
        run = other.policy.run if other.names_run else first.policy.run
        policy = other.policy._replace(run=run)
        if (policy, other.in_flight) != (first.policy, first.in_flight):
            raise ManifestError(
                f"on rank {rank}: the update is to {policy} with in_flight={other.in_flight!r}, "
                f"but on the first rank to {first.policy} with in_flight={first.in_flight!r}; "
                f"pass the same on all ranks"
            )
    return first.policy
