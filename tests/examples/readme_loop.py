"""README's loop on the demo's task: ``python -m tests.examples.readme_loop CHECKPOINT``, one that
``python -m examples.grpo`` left. Prints the rewards of its steps, and of the evaluation before and
after."""

import re
import sys
from statistics import fmean
from types import ModuleType
from typing import Any

import trainer_bridge
from examples.grpo import arithmetic
from examples.grpo.engine import KEYWORDS
from examples.grpo.loop import EVALUATION_PROBLEMS, LEARNING_RATE, SAMPLING
from tests.engine.harness import ROOT

STEPS, PROMPTS = 60, 16
CHANGES = {
    '{"temperature": 1.0, "max_new_tokens": 256, "n": 8}': "{**SAMPLING, 'n': 8}",
    '"Qwen/Qwen3-0.6B"': "sys.argv[1]",
    ".cuda()": "",
    "lr=1e-6": f"lr={LEARNING_RATE}",
    "mem_fraction_static=0.3": f"skip_tokenizer_init=True, log_level='error', **{KEYWORDS['cpu']}",
    "    for step in range(100):": f"    evaluate(engine, -1)\n    for step in range({STEPS}):",
    "engine, PROMPTS": "engine, arithmetic.prompts_of(problems(step))",
    "list(map(reward, rollout.texts))": "rewards(step, rollout)",
    ', torch.autocast("cuda", torch.bfloat16)': "",
    'with torch.autocast("cuda", torch.bfloat16)': "if True",
}
"""The task, the flags of an engine on a CPU, no autocast."""
END = f"""
    trainer_bridge.update(model, engine, version={STEPS})
    evaluate(engine, {STEPS})
    engine.shutdown()
"""


def problems(step: int) -> list[arithmetic.Problem]:
    return arithmetic.draw_problems(PROMPTS, f"0 step {step}")


def rewards(step: int, rollout: trainer_bridge.Rollout) -> list[float]:
    found = arithmetic.score(problems(step), rollout.tokens)
    print(f"step {step}: reward {fmean(found):.3f}", flush=True)
    return found


def evaluate(engine: Any, version: int) -> None:
    asked = arithmetic.draw_problems(EVALUATION_PROBLEMS, "0 evaluation")
    prompts = arithmetic.prompts_of(asked)
    rollout = trainer_bridge.rollout(engine, prompts, SAMPLING, expected_version=version)
    print(f"evaluation: {fmean(arithmetic.score(asked, rollout.tokens)):.3f}", flush=True)


def main() -> None:
    page = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert found is not None
    loop = found[1]
    for old, new in CHANGES.items():
        assert loop.count(old) == 1, old
        loop = loop.replace(old, new)
    task = ModuleType("my_task")
    vars(task).update(PROMPTS=None, reward=None)
    sys.modules["my_task"] = task
    exec(compile(loop + END, "README.md", "exec"), dict(globals()))  # a copy: it imports PROMPTS


if __name__ == "__main__":  # SGLang spawns processes that import this file
    main()
