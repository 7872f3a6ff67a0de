"""The task of a pretrained model: sums of three digits, asked in a chat.

    user       7 + 5 + 8
    assistant  7 + 5 = 12, 12 + 8 = 20

Two sums with their answers stand before it, which show the form. Only what follows the last ``=``
is the answer. The model is right now and then: what is left to learn, only the reward can tell.
"""

import random
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.learning.tasks import Problem, Task, is_held_out

TERMS = 3
LARGEST = 9
SHOWN = ((2, 3, 4), (9, 4, 6))
"""Sums that stand before each problem."""
MAX_NEW_TOKENS = 32
"""The longest right response in the form that is shown has 20."""


def task(folder: Path) -> Task:
    """The task for a checkpoint with a tokenizer and a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Task(
        draw=draw_problems,
        encode=partial(encode, tokenizer),
        decode=tokenizer.decode,
        reward=partial(reward, tokenizer.eos_token),
        end_token=tokenizer.eos_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
    )


def draw_problems(count: int, seed: str, held_out: bool = False) -> list[Problem]:
    """The same ones for the same seed; held-out ones never come up in training."""
    rng = random.Random(seed)
    return [make_problem(rng, held_out) for _ in range(count)]


def make_problem(rng: random.Random, held_out: bool = False) -> Problem:
    """A sum that is not one of those shown."""
    while True:
        terms = tuple(rng.randint(1, LARGEST) for _ in range(TERMS))
        problem = Problem("chain", 1, asked(terms), str(sum(terms)))
        if is_held_out(problem) is held_out and terms not in SHOWN:
            return problem


def asked(terms: tuple[int, ...]) -> str:
    """Such as ``7 + 5 + 8``."""
    return " + ".join(map(str, terms))


def answered(terms: tuple[int, ...]) -> str:
    """Such as ``7 + 5 = 12, 12 + 8 = 20``."""
    steps = zip(accumulate(terms), terms[1:], strict=False)
    return ", ".join(f"{total} + {term} = {total + term}" for total, term in steps)


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of the whole chat."""
    shown = [(asked(terms), answered(terms)) for terms in SHOWN]
    pairs = [zip(("user", "assistant"), pair, strict=True) for pair in shown]
    turns = [*(turn for pair in pairs for turn in pair), ("user", prompt)]
    chat = [{"role": role, "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def reward(end: str, problem: Problem, response: str) -> float:
    """1.0 where the response ends and the answer follows its last ``=``, else 0.0."""
    if not response.endswith(end):
        return 0.0
    return float(response.removesuffix(end).rpartition("=")[2].strip() == problem.answer)
