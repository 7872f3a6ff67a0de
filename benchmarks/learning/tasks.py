"""The tasks: sums, sorting and products, worked out step by step, checked by a program.

    total    T+7+3-4+9=    +3:3+9:12-4:8+7:15
    sort     Sdbca=        bdca,bcda,bcad,bacd,abcd
    product  P47*36=       7*6+0=42,4*6+4=28:282;7*3+0=21,4*3+2=14:141;2+0+0=2,8+1+0=9,...:1692

Only what stands last is the answer. A model learns from a teacher who is sloppy, who now and then
makes a total wrong, copies a letter twice or forgets a carry, and who takes terms and swaps in an
order of his own. So what it samples has entropy, and wrong answers which it could get right: what
is left to learn, only the reward can tell.

A token is a character and its id is the ASCII code, as in ``arithmetic``. Everything that is drawn
comes from the generator that is passed in.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from examples.grpo.arithmetic import END, END_TOKEN, decode, encode

LEVELS = (1, 2, 3)
LONG = 4
"""A level more, of long responses."""
LONGEST = {1: 288, 2: 288, 3: 288, LONG: 640}
"""Tokens of a response. A right one of the teacher has 260 characters at most (a sort of nine
letters, 26 swaps); of the long ones 598 (twelve letters, 46 swaps)."""
TERMS = {1: (8, 9), 2: (12, 20), 3: (16, 40), LONG: (48, 60)}
"""Number of terms, and the largest."""
LETTERS = {1: (7, 13), 2: (8, 18), 3: (9, 26), LONG: (12, 46)}
"""Number of letters, and the most swaps that sorting may take."""
LEAST_SWAPS = 4
DIGITS = {1: (3, 2), 2: (4, 2), 3: (4, 3), LONG: (6, 5)}
"""Of both factors."""
CARE = {LONG: 0.4}
"""By how much the teacher's chance to slip is less in a long response: he is right as often."""
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """What is asked, and the answer."""

    kind: str
    level: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """Problems, and how they are put to a model and its responses are marked."""

    draw: Callable[..., list[Problem]]
    """As ``draw_problems``, the same ones for the same seed."""
    encode: Callable[[str], list[int]]
    """Token ids of a problem's prompt."""
    decode: Callable[[list[int]], str]
    """The text of a response, its end token included."""
    reward: Callable[[Problem, str], float]
    end_token: int
    max_new_tokens: int


def make_total(level: int, rng: random.Random) -> Problem:
    """Signed terms whose sum is not negative."""
    count, largest = TERMS[level]
    terms: list[int] = []
    for _ in range(count):
        term, sign = rng.randint(1, largest), rng.choice((1, -1))
        terms.append(term if sum(terms) < term else sign * term)
    rng.shuffle(terms)
    prompt = "T" + "".join(f"{term:+d}" for term in terms) + "="
    return Problem("total", level, prompt, str(sum(terms)))


def show_total(problem: Problem, rng: random.Random, slip: float) -> str:
    """Each term with the total so far, in random order, but no total is negative."""
    left = [int(term) for term in problem.prompt[1:-1].replace("-", "+-").split("+") if term]
    total, steps = 0, []
    while left:
        fitting = [term for term in left if total + term >= 0] or left
        term = rng.choice(fitting)
        left.remove(term)
        total += term
        if rng.random() < slip:
            total = abs(total + rng.choice((-10, -1, 1, 10)))
        steps.append(f"{term:+d}:{total}")
    return "".join(steps)


def make_sort(level: int, rng: random.Random) -> Problem:
    """Different letters, in an order that takes a bounded number of swaps to sort."""
    count, most = LETTERS[level]
    while True:
        letters = rng.sample("abcdefghijklmnopqrstuvwxyz", count)
        swaps = sum(a > b for i, a in enumerate(letters) for b in letters[i + 1 :])
        if LEAST_SWAPS <= swaps <= most:
            return Problem("sort", level, f"S{''.join(letters)}=", "".join(sorted(letters)))


def show_sort(problem: Problem, rng: random.Random, slip: float) -> str:
    """The letters after each swap of two neighbours, any two that are in the wrong order."""
    letters, steps = list(problem.prompt[1:-1]), []
    while wrong := [i for i in range(len(letters) - 1) if letters[i] > letters[i + 1]]:
        at = rng.choice(wrong)
        letters[at], letters[at + 1] = letters[at + 1], letters[at]
        if rng.random() < slip:
            letters[at] = letters[at + 1]
        steps.append("".join(letters))
    return ",".join(steps)


def make_product(level: int, rng: random.Random) -> Problem:
    """Two factors of given numbers of digits."""
    a, b = (rng.randint(10 ** (n - 1), 10**n - 1) for n in DIGITS[level])
    return Problem("product", level, f"P{a}*{b}=", str(a * b))


def show_product(problem: Problem, rng: random.Random, slip: float) -> str:
    """One product for each digit of the second factor, last digit first, and their sum by columns.

    A step is ``digit*digit+carry=value``, or ``digit+...+carry=value`` of a column; a product or
    the sum stands behind a colon.
    """
    a, b = problem.prompt[1:-1].split("*")
    parts, products = [], []
    for digit in reversed(b):
        text, value = _columns([[int(d)] for d in reversed(a)], int(digit), rng, slip)
        parts.append(text)
        products.append(value)
    width = len(a) + len(b)
    shifted = [("0" * k + value[::-1]).ljust(width, "0") for k, value in enumerate(products)]
    columns = [[int(text[i]) for text in shifted] for i in range(width)]
    parts.append(_columns(columns, None, rng, slip)[0])
    return ";".join(parts)


def _columns(
    columns: list[list[int]], factor: int | None, rng: random.Random, slip: float
) -> tuple[str, str]:
    """Steps and result of columns, the last digit's first, each summed, times ``factor`` if any."""
    carry, digits, steps = 0, "", []
    for column in columns:
        value = sum(column) * (1 if factor is None else factor) + carry
        left = "+".join(map(str, column)) + ("" if factor is None else f"*{factor}")
        steps.append(f"{left}+{carry}={value}")
        digits = str(value % 10) + digits
        carry = value // 10
        if carry and rng.random() < slip:
            carry = 0
    result = str(int(f"{carry}{digits}"))
    return f"{','.join(steps)}:{result}", result


@dataclass(frozen=True)
class Kind:
    """One type of task."""

    make: Callable[[int, random.Random], Problem]
    show: Callable[[Problem, random.Random, float], str]
    slip: float
    """The teacher's chance to go wrong at each step where he can."""
    separator: str
    """What stands before the answer."""


KINDS = {
    "total": Kind(make_total, show_total, 0.08, ":"),
    "sort": Kind(make_sort, show_sort, 0.06, ","),
    "product": Kind(make_product, show_product, 0.15, ":"),
}


def make_problem(
    rng: random.Random, held_out: bool = False, levels: Sequence[int] = LEVELS
) -> Problem:
    """A problem of any kind and of one of these levels; held-out ones never come up in training."""
    kind, level = KINDS[rng.choice(list(KINDS))], rng.choice(levels)
    while is_held_out(problem := kind.make(level, rng)) is not held_out:
        pass
    return problem


def draw_problems(
    count: int, seed: str, held_out: bool = False, levels: Sequence[int] = LEVELS
) -> list[Problem]:
    """The same ones for the same seed."""
    rng = random.Random(seed)
    return [make_problem(rng, held_out, levels) for _ in range(count)]


def is_held_out(problem: Problem) -> bool:
    """Whether it is for evaluation: one problem in HELD_OUT_ONE_IN, by a hash of its prompt."""
    return zlib.crc32(problem.prompt.encode()) % HELD_OUT_ONE_IN == 0


def demonstrate(problem: Problem, rng: random.Random, slip: float | None = None) -> str:
    """A response of the teacher, who goes on from a wrong step as if it were right.

    Args:
        slip: in the place of the kind's own; 0 gives a right response.
    """
    kind = KINDS[problem.kind]
    if slip is None:
        slip = kind.slip * CARE.get(problem.level, 1.0)
    return kind.show(problem, rng, slip) + END


def max_new_tokens(levels: Sequence[int]) -> int:
    """Of a response to problems of these levels."""
    return max(LONGEST[level] for level in levels)


def reward(problem: Problem, response: str) -> float:
    """1.0 where the response ends and what stands last in it is the answer, else 0.0."""
    if not response.endswith(END):
        return 0.0
    separator = KINDS[problem.kind].separator
    return float(response[: -len(END)].split(separator)[-1] == problem.answer)


def worked_out(levels: Sequence[int] = LEVELS) -> Task:
    """The task of the models that are trained from scratch, with problems of these levels."""
    draw = partial(draw_problems, levels=levels)
    return Task(draw, encode, decode, reward, END_TOKEN, max_new_tokens(levels))
