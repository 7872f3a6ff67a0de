"""The demo's task: sums of small numbers, worked out loud, whose answers a program can check.

    prompt    3+5-2+4-1=
    response  8,6,10,9<newline>

The response is the running totals; the last one is the answer. A model learns the task from a
sloppy teacher who now and then adds where the sum subtracts, so that it samples wrong answers which
it could get right: what is left to learn, only the reward can tell.

A token is a character and its id is the ASCII code, so there is no tokenizer.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

VOCAB_SIZE = 128
END = "\n"
END_TOKEN = ord(END)
MAX_NEW_TOKENS = 16  # the longest right response: four totals of two digits, three commas, the end

TERMS = 5
LARGEST_TERM = 5
SLIP = 0.4  # the chance that the teacher adds where the sum subtracts


@dataclass(frozen=True)
class Problem:
    """A sum of signed terms; the first is positive and no running total is negative."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """Such as ``3+5-2+4-1=``."""
        first, *rest = self.terms
        return f"{first}{''.join(f'{term:+d}' for term in rest)}="

    @property
    def answer(self) -> int:
        return sum(self.terms)


def make_problem(rng: random.Random) -> Problem:
    """Draw a problem of TERMS terms from 1 to LARGEST_TERM."""
    terms = [rng.randint(1, LARGEST_TERM)]
    for _ in range(TERMS - 1):
        term, sign = rng.randint(1, LARGEST_TERM), rng.choice((1, -1))
        terms.append(term if sum(terms) < term else sign * term)
    return Problem(tuple(terms))


def demonstrate(problem: Problem, rng: random.Random, slip: float = SLIP) -> str:
    """A response of the teacher, who goes on from a wrong total as if it were right."""
    terms = [abs(term) if rng.random() < slip else term for term in problem.terms]
    totals = list(accumulate(terms))[1:]
    return ",".join(map(str, totals)) + END


def reward(problem: Problem, response: str) -> float:
    """1.0 where the response ends and its last total is the answer, else 0.0."""
    if not response.endswith(END):
        return 0.0
    return float(response[: -len(END)].split(",")[-1] == str(problem.answer))


def draw_problems(count: int, seed: str) -> list[Problem]:
    """The same ones for the same seed."""
    rng = random.Random(seed)
    return [make_problem(rng) for _ in range(count)]


def prompts_of(problems: list[Problem]) -> list[list[int]]:
    """Token ids of each prompt."""
    return [encode(problem.prompt) for problem in problems]


def score(problems: list[Problem], responses: list[list[int]]) -> list[float]:
    """Reward of each response; those to one problem stand side by side."""
    n = len(responses) // len(problems)
    repeated = [problem for problem in problems for _ in range(n)]
    pairs = zip(repeated, responses, strict=True)
    return [reward(problem, decode(tokens)) for problem, tokens in pairs]


def encode(text: str) -> list[int]:
    """ASCII codes. Raises ValueError (UnicodeEncodeError) for any other character."""
    return list(text.encode("ascii"))


def decode(tokens: list[int]) -> str:
    """The text of token ids, each below VOCAB_SIZE."""
    return bytes(tokens).decode("ascii")
