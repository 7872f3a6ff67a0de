"""README and docs: measured blocks, links, and the loop that README shows."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainer_bridge
from benchmarks import readme
from tests.trainer_bridge.moe_models import tiny

README = readme.ROOT / "README.md"
LINES = 150
LOOP_LINES = 26
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)]*)?\)")
LINKING = [
    page
    for folder in (".", "benchmarks", "docs", "tests")
    for page in sorted((readme.ROOT / folder).glob("*.md"))
]


def test_each_block_stands_on_one_page() -> None:
    found = [name for page in readme.PAGES for name in names_of(page)]
    assert sorted(found) == sorted(readme.BLOCKS)


def names_of(page: Path) -> list[str]:
    return [name for _, name, _ in readme.BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.stem)
def test_blocks_hold_what_their_result_files_give(page: Path) -> None:
    text = page.read_text()
    for match in readme.BLOCK.finditer(text):
        assert readme.filled(match) == match[0], f"{match[2]}: run python -m benchmarks.readme"
    assert text.count("<!-- measured:") == len(names_of(page))


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(readme.ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            if anchor and there.suffix == ".md":
                assert anchor[1:] in anchors_of(there), f"{page.name} links to {target}{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (readme.ROOT / "docs" / "README.md").read_text()
    linked = {target for target, _ in LINK.findall(index)}
    assert {page.name for page in readme.PAGES[1:]} - {"README.md"} <= linked


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= LINES


class FakeEngine:
    """Stands for ``sglang.Engine``."""

    def __init__(self, **keywords: Any) -> None:
        assert keywords["quantization"] == "fp8rl"

    def shutdown(self) -> None:
        pass


def rollout_of(
    prompts: list[list[int]], tokens: list[list[int]], logprobs_BT: torch.Tensor, version: int
) -> trainer_bridge.Rollout:
    rows = [row[: len(t)].tolist() for row, t in zip(logprobs_BT, tokens, strict=True)]
    stamps = [[version] * len(t) for t in tokens]
    more: Any = {"groups": [row // 8 for row in range(len(tokens))]}
    more["texts"] = [" ".join(map(str, row)) for row in tokens]
    ended = ["stop"] * len(tokens)
    return trainer_bridge.Rollout(prompts, tokens, rows, stamps, ended, 1.0, **more)


def run_loop(monkeypatch: pytest.MonkeyPatch, reasons: list[str], reward: Any) -> tuple[Any, int]:
    """The model after the loop of the page, and how many updates it made. Without an engine:
    logprobs of the rollouts are those of the model itself.

    Args:
        reasons: the finish reasons of each rollout, in turn.
    """
    (loop,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(loop.splitlines()) <= LOOP_LINES
    model = tiny("qwen3")
    versions: list[int] = []

    def update(model: Any, engine: Any, version: int) -> None:
        versions.append(version)

    def rollout(engine: Any, prompts: Any, sampling: Any, **_: Any) -> trainer_bridge.Rollout:
        count = sampling["n"] * len(prompts)
        tokens = [[(7 * i) % 60 + 1, 5, 9][: 1 + i % 3] for i in range(count)]
        found = (reasons * count)[:count]
        tokens = [[] if why == "error" else row for row, why in zip(tokens, found, strict=True)]
        repeated = [[3, 4] for _ in tokens]
        with torch.no_grad():
            logprobs_BT = trainer_bridge.response_logprobs(model, repeated, tokens)
        batch = rollout_of(repeated, tokens, logprobs_BT, versions[-1])
        return replace(batch, finish_reasons=found)

    auto = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    task = SimpleNamespace(PROMPTS=["a", "b"], reward=reward)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_bridge, "rollout", rollout)
        patch.setattr(trainer_bridge, "update", update)
        patch.setattr(torch.nn.Module, "cuda", lambda module: module)
        patch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=FakeEngine))
        patch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=auto))
        patch.setitem(sys.modules, "my_task", task)
        exec(compile(loop, "README.md", "exec"), {"__name__": "__main__"})
    assert versions == list(range(len(versions)))
    return model, len(versions)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_loop_of_readme_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    model, updates = run_loop(monkeypatch, ["stop"], lambda text: float(len(text)))
    assert updates > 1 and not same(model, tiny("qwen3"))


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_the_loop_of_readme_leaves_out_what_failed(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its reward, it moves no baseline: where the others are equally good, there is
    nothing to learn."""

    def model(reasons: list[str], of_failed: float) -> Any:
        of_third = 1.0 if reasons == ["stop"] else of_failed  # the third has three tokens, or none

        def reward(text: str) -> float:
            return of_third if len(text.split()) in (0, 3) else 1.0

        return run_loop(monkeypatch, reasons, reward)[0]

    nothing = model(["stop"], 1.0)
    for of_failed in (0.0, -100.0):
        assert same(model(["stop", "length", reason], of_failed), nothing)


def test_slices_of_a_large_batch_give_the_gradient_of_the_whole() -> None:
    page = (readme.ROOT / "docs" / "correction.md").read_text()
    (block,) = re.findall(r"## Large batches\n.*?```python\n(.*?)```", page, re.DOTALL)
    model, generator = tiny("qwen3"), torch.Generator().manual_seed(0)
    tokens = [[(7 * i) % 60 + 1, 5, 9, 11][: i % 5] for i in range(20)]
    prompts = [[3, 4]] * len(tokens)
    logprobs_BT = trainer_bridge.response_logprobs(model, prompts, tokens)
    far_BT = logprobs_BT.detach() + 0.1 * torch.randn(logprobs_BT.shape, generator=generator)
    rollout = rollout_of(prompts, tokens, far_BT, version=0)
    advantages_B1 = torch.randn(len(tokens), 1, generator=generator)

    correction = trainer_bridge.correct(rollout, logprobs_BT.detach())
    losses_BT = trainer_bridge.policy_loss(logprobs_BT, advantages_B1, correction)
    losses_BT[correction.mask_BT].mean().backward()
    of_whole = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    names = {"model": model, "rollout": rollout, "advantages_B1": advantages_B1}
    known = {"torch": torch, "trainer_bridge": trainer_bridge}
    exec(compile(block, "correction.md", "exec"), known | names)
    for parameter, whole in zip(model.parameters(), of_whole, strict=True):
        torch.testing.assert_close(parameter.grad, whole)
