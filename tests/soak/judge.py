"""Whether each token was sampled by the policy whose version it carries."""

from array import array
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby

import torch

from tests.logprob_oracle import Reference, Sampled


class ViolationError(AssertionError):
    """A guarantee does not hold."""


@dataclass(frozen=True)
class Segment:
    """The tokens of one version in one sequence."""

    sampled: Sampled
    version: int
    first: int
    last: int
    """One behind the last."""

    @property
    def whole(self) -> list[int]:
        """Prompt and tokens up to the last of these."""
        return self.sampled.prompt + self.sampled.tokens[: self.last]


class Judge:
    """Holds each token's logprob against the policy of its version, on the same prefix.

    As a control some are also compared with the policy of the version before, which must differ.

    Args:
        references: of each policy.
        token_bound: of |difference| of one token.
        segment_bound: of its mean over the tokens of one version in one sequence.
    """

    LEAST_TOKENS = 8
    """Of a segment whose mean is bounded."""
    CONTROL_EVERY = 4
    """Segments for one that is also compared with the version before."""

    def __init__(
        self, references: list[Reference], token_bound: float, segment_bound: float
    ) -> None:
        self.policies: dict[int, int] = {}
        """Version that was committed -> policy."""
        self.tokens = self.mixed_tokens = self.mixed_sequences = 0
        self._references = references
        self._token_bound, self._segment_bound = token_bound, segment_bound
        # plain numbers: a tensor for each segment takes several KiB an update
        self._differences, self._controls = array("f"), array("f")
        self._segment_means: list[float] = []

    def check(self, sequences: list[Sampled]) -> None:
        """Check these sequences.

        Raises:
            ViolationError: a token is of no committed version, or not of the one that it carries.
        """
        segments = [segment for sampled in sequences for segment in self._segments(sampled)]
        own = self._compare([(s, self.policies[s.version]) for s in segments])
        for segment, difference in zip(segments, own, strict=True):
            self._check_segment(segment, difference)
        controls = segments[:: self.CONTROL_EVERY]
        before = [(s, self._before(s.version)) for s in controls if self._before(s.version) >= 0]
        for difference in self._compare(before):
            self._controls.extend(difference.tolist())

    def _segments(self, sampled: Sampled) -> list[Segment]:
        versions = sampled.versions
        if versions != sorted(versions) or set(versions) - self.policies.keys():
            raise ViolationError(f"versions are {versions}, committed {sorted(self.policies)[-5:]}")
        self.mixed_sequences += len(set(versions)) > 1
        found, first = [], 0
        for version, group in groupby(versions):
            last = first + len(list(group))
            found.append(Segment(sampled, version, first, last))
            first = last
        return found

    def _before(self, version: int) -> int:
        """The policy of the version before, -1 where there is none."""
        older = [v for v in self.policies if v < version]
        return self.policies[max(older)] if older else -1

    def _compare(self, pairs: list[tuple[Segment, int]]) -> list[torch.Tensor]:
        """|difference| of each token of each segment from what that policy gives."""
        of_policy: dict[int, list[int]] = defaultdict(list)
        for index, (_, policy) in enumerate(pairs):
            of_policy[policy].append(index)
        found: dict[int, torch.Tensor] = {}
        for policy, indices in of_policy.items():
            rows = self._references[policy].logprobs([pairs[index][0].whole for index in indices])
            for index, row in zip(indices, rows, strict=True):
                segment = pairs[index][0]
                given = segment.sampled.logprobs[segment.first : segment.last]
                wanted = row[len(row) - len(given) :]
                found[index] = (torch.tensor(given) - wanted).abs()
        return [found[index] for index in range(len(pairs))]

    def _check_segment(self, segment: Segment, difference: torch.Tensor) -> None:
        self.tokens += len(difference)
        self._differences.extend(difference.tolist())
        mean, largest = float(difference.mean()), float(difference.max())
        if len(difference) >= self.LEAST_TOKENS:
            self._segment_means.append(mean)
        is_far_on_average = mean > self._segment_bound and len(difference) >= self.LEAST_TOKENS
        if is_far_on_average or largest > self._token_bound:
            self.mixed_tokens += len(difference)
            raise ViolationError(
                f"tokens {segment.first} to {segment.last} carry version {segment.version} and "
                f"their logprobs are not its policy's: |difference| is {mean:.3f} on average and "
                f"{largest:.3f} at most, of {difference.tolist()}; {segment.sampled}"
            )

    def summary(self) -> dict[str, float]:
        """Differences of all tokens so far, and how many the control tells apart."""
        own, wrong = (torch.tensor(d or [0.0]) for d in (self._differences, self._controls))
        return {
            "mean": float(own.mean()),
            "largest": float(own.max()),
            "largest segment mean": max(self._segment_means, default=0.0),
            "control mean": float(wrong.mean()),
            "control median": float(wrong.median()),
            "control told apart": float((wrong > self._token_bound).float().mean()),
        }
