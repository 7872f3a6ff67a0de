"""What an 8-bit KV cache does to logprobs of a trained model, by position, each cause alone.

    python -m benchmarks.run kv_causes                                  # SmolLM2-135M-Instruct
    python -m benchmarks.run kv_causes --checkpoint FOLDER --device cuda --output other.json

Everything else is exact: the model is in FP32, and attention is computed in plain torch. A text is
read as if each token had been decoded; of a long one the last ``DECODED``, behind a prefix that was
prefilled in FP32 over the same codes. The folder may hold any model whose attention is a softmax
over K behind RoPE (Llama, Qwen). Without a tokenizer a character is a token, as in the studies of
learning.

causes-*        codes of K and V, queries, probabilities and sums, alone and together
codes-*         other codes, also with outliers planted into K
calibration     bias of the simulated sums for the values that ``kv_decode`` draws

Shape suffixes: H heads, T tokens, Q queries, D head dim, V vocabulary.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.benchmark import Benchmark, Job, Measurement, Option, Run
from benchmarks.environment import ROOT
from benchmarks.kv import attention_inputs as drawn
from benchmarks.kv import simulated
from benchmarks.kv.simulated import (
    Codes,
    by_layer,
    by_power_of_two,
    by_token,
    e4m3,
    fp16,
    int8,
    offset,
    rotated,
)
from benchmarks.parity.tasks import LONG, demonstrate, draw_problems
from benchmarks.pretrained.checkpoint import convert
from benchmarks.pretrained.measured import TEXTS as PAGES

NAME = "kv_causes"
"""Of our attention in transformers."""
DECODED = 128
"""Tokens of a long text that are decoded."""
SCORED_FROM = 16
TEXTS = ("prose", "sums")
LENGTHS = (768, 2048, 4096)
RANGES = ((16, 64), (64, 256), (256, 512), (512, 768))
CODES_LENGTH = 384


class Arm(NamedTuple):
    """What is not exact."""

    name: str
    k: Codes | None = None
    v: Codes | None = None
    q: Codes | None = None
    p: Codes | None = None
    """Of probabilities, the largest of which is 448."""
    short_sums: bool = False


class Plant(NamedTuple):
    """What is added to K before it is coded, and taken back from what the codes stand for."""

    name: str
    size: float = 0.0
    turns: float | None = None
    """The pair of channels that RoPE turns, as a share of all; or two channels are constant."""


class Work(NamedTuple):
    """What one process measures."""

    kind: str
    text: str = ""
    length: int = 0
    windows: int = 0


CAUSES = (
    Arm("codes of K", k=by_layer),
    Arm("codes of V", v=by_layer),
    Arm("Q in E4M3", q=by_power_of_two),
    Arm("P in E4M3", p=e4m3),
    Arm("sums of 14 bits", short_sums=True),
    Arm("all five: XQA", by_layer, by_layer, by_power_of_two, e4m3, True),
    Arm("all but the sums", by_layer, by_layer, by_power_of_two, e4m3),
    Arm("codes of K and V", by_layer, by_layer),
    Arm("our decode kernel", by_layer, by_layer, fp16, fp16),
)
CODES = (
    Arm("E4M3, layer", by_layer, by_layer),
    Arm("E4M3, power of two", by_power_of_two, by_power_of_two),
    Arm("E4M3, token and head", by_token, by_token),
    Arm("INT8, token and head", int8, int8),
    Arm("the same, offsets", offset(int8), offset(int8)),
    Arm("the same, K rotated", rotated(int8), int8),
    Arm("the same, both", rotated(offset(int8)), offset(int8)),
)
NOTHING = Plant("nothing")
PLANTS = (
    NOTHING,
    *(
        Plant(f"{name} {size}", size, turns)
        for name, turns in (("constant", None), ("quick pair", 1 / 16), ("slow pair", 1 / 2))
        for size in (20, 100)
    ),
)


def measure(work: Work, run: Run) -> list[Measurement]:
    """Each arm beside the exact model on each window; a row has a value of each window."""
    if work.kind == "calibration":
        return list(calibration())
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    folder = run.options["checkpoint"]
    folder = convert(run.shared / "smollm2-135m") if folder is None else Path(folder)
    device = torch.device(run.options["device"])
    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(attention, Arm("exact"), NOTHING, 0))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=NAME
    )
    model.to(device).eval()
    made: list[Measurement] = []
    kept = DECODED if work.length > LENGTHS[0] else work.length
    count = work.windows * run.options["times"]
    for ids in windows(folder, work.text, work.length, count):
        ids_T = torch.tensor(ids, device=device)

        def logprobs(arm: Arm, plant: Plant = NOTHING, ids_T: torch.Tensor = ids_T) -> torch.Tensor:
            """Of all tokens of the vocabulary, in the place of each scored token: TV."""
            hook = partial(attention, arm, plant, len(ids_T) - kept)
            ALL_ATTENTION_FUNCTIONS.register(NAME, hook)
            with torch.inference_mode():
                logits = model(ids_T[None], logits_to_keep=kept, use_cache=False).logits
            found: torch.Tensor = logits[0, :-1].log_softmax(-1)
            return found

        wanted = logprobs(Arm("exact"))
        for arm, plant, ranges in _cases(work, kept):
            values = divergences(wanted, logprobs(arm, plant), ids_T[1 - kept :])
            for name, start, end in ranges:
                part = slice(start - 1 - len(ids_T) + kept, end - 1 - len(ids_T) + kept)
                means = {metric: [float(x[part].mean())] for metric, x in values.items()}
                case = f"{work.text}, {name}"
                made.append({"arm": arm.name, "model": folder.name, "case": case, "values": means})
    return made


def _cases(work: Work, kept: int) -> Iterator[tuple[Arm, Plant, list[tuple[str, int, int]]]]:
    """Arms, what is planted, and by name the tokens that are scored together."""
    if work.kind == "causes":
        long = (work.length - kept + 1, work.length)
        ranges = RANGES if kept == work.length else (long,)
        for arm in CAUSES:
            yield arm, NOTHING, [(f"{a} to {b - 1}", a, b) for a, b in ranges]
        return
    for plant in PLANTS:
        for arm in CODES:
            yield arm, plant, [(plant.name, SCORED_FROM, work.length)]
    for arm in CODES:
        for name, alone in (("K alone", arm._replace(v=None)), ("V alone", arm._replace(k=None))):
            yield alone, NOTHING, [(name, SCORED_FROM, work.length)]


def attention(
    arm: Arm,
    plant: Plant,
    first: int,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of one sequence for transformers, which is decoded from ``first`` on."""
    (q_HTD,), (k_HTD,), (v_HTD,) = query, key, value
    if arm.k is not None:
        planted_TD = outliers(plant, module.config, k_HTD)
        k_HTD = arm.k(k_HTD + planted_TD) - planted_TD
    if arm.v is not None:
        v_HTD = arm.v(v_HTD)
    if arm.q is not None:
        q_HTD = torch.cat((q_HTD[:, :first], arm.q(q_HTD[:, first:])), 1)
    q_HTD = q_HTD * scaling
    k_HTD, v_HTD = (x.repeat_interleave(len(q_HTD) // len(x), 0) for x in (k_HTD, v_HTD))
    if arm.p is None and not arm.short_sums:
        first = q_HTD.shape[1]
    parts = [simulated.exact(q_HTD[:, :first], k_HTD, v_HTD)] if first else []
    if first < q_HTD.shape[1]:
        add = simulated.short_sum if arm.short_sums else simulated.full_sum
        rest = q_HTD[:, first:]
        parts.append(simulated.attend(rest, k_HTD, v_HTD, first, p_codes=arm.p, add=add))
    return torch.cat(parts, 1).transpose(0, 1)[None], None


def outliers(plant: Plant, config: Any, k_HTD: torch.Tensor) -> torch.Tensor:
    """What is planted into each head: TD."""
    tokens, dim = k_HTD.shape[1:]
    half = dim // 2
    planted_TD = torch.zeros(tokens, dim, device=k_HTD.device)
    if plant.turns is None:
        planted_TD[:, half - 2 : half] = plant.size
        return planted_TD
    pair = int(plant.turns * half)
    speed = config.rope_parameters["rope_theta"] ** (-pair / half)
    angle_T = torch.arange(tokens, device=k_HTD.device) * speed
    planted_TD[:, pair], planted_TD[:, pair + half] = angle_T.cos(), angle_T.sin()
    return planted_TD * plant.size


def divergences(
    wanted_TV: torch.Tensor, found_TV: torch.Tensor, ids_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Of each token: KL(exact || found), k3 and difference of the text's token, its magnitude."""
    kl_T = (wanted_TV.exp() * (wanted_TV - found_TV)).sum(-1)
    found_T, wanted_T = (x.gather(-1, ids_T[:, None])[:, 0] for x in (found_TV, wanted_TV))
    log_ratio_T = (wanted_T - found_T).double()  # trainer over rollout
    return {
        "kv_kl": kl_T,
        "mismatch_kl_k3": torch.expm1(log_ratio_T) - log_ratio_T,
        "logprob_bias": -log_ratio_T,
        "logprob_abs_diff_mean": log_ratio_T.abs(),
    }


# ---- texts ---------------------------------------------------------------------------------------


def windows(folder: Path, text: str, length: int, count: int) -> list[list[int]]:
    """Token ids: pieces of this repository's pages, or sums that the studies' teacher works out."""
    if text == "prose":
        ids = tokens(folder, "\n".join((ROOT / name).read_text() for name in PAGES[1:]))
        starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
        return [ids[start : start + length] for start in starts]
    return [tokens(folder, sums(seed, length))[:length] for seed in range(count)]


def sums(seed: int, characters: int) -> str:
    """Problems and responses, one after the other."""
    rng, made = random.Random(seed), ""
    problems = draw_problems(characters, f"kv_causes {seed}", levels=[LONG])
    for problem in (problem for problem in problems if problem.kind == "total"):
        made += problem.prompt + demonstrate(problem, rng)
        if len(made) > 2 * characters:
            break
    return made


def tokens(folder: Path, text: str) -> list[int]:
    """By the folder's tokenizer; without one, a character's ASCII code."""
    if not any(folder.glob("tokenizer*")):
        return list(text.encode("ascii", "ignore"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


# ---- the simulated sums beside the GPU's ---------------------------------------------------------

LOADS = [
    drawn.Load(1, context, v_mean=mean, softmax=softmax)
    for context in (512, 2048, 8192, 30016)
    for mean, softmax in ((0.3, "peaked"), (1.0, "peaked"), (1.0, "flat"))
]
SEQUENCES = 3


def calibration(loads: Sequence[drawn.Load] = LOADS) -> Iterator[Measurement]:
    """Bias against float64 over the same codes; a value of each sequence, in one split."""
    for load in loads:
        values: dict[str, list[float]] = {"16 bits": [], "14 bits": []}
        for seed in range(SEQUENCES):
            inputs = drawn.draw(load, "cpu", seed)
            k_HTD, v_HTD = (
                by_layer(x.float()).transpose(0, 1) for x in (inputs.k_SHD, inputs.v_SHD)
            )
            meant = replace(inputs, k_SHD=k_HTD.transpose(0, 1), v_SHD=v_HTD.transpose(0, 1))
            wanted = drawn.exact(meant)
            q_HGD = by_power_of_two(inputs.q_BHGD[0].float()) * drawn.DIM**-0.5
            q_H1D = q_HGD.flatten(0, 1)[:, None]
            k, v = (x.repeat_interleave(drawn.GROUP, 0) for x in (k_HTD, v_HTD))
            for name, add in (("16 bits", simulated.full_sum), ("14 bits", simulated.short_sum)):
                out = simulated.attend(q_H1D, k, v, load.context - 1, p_codes=e4m3, add=add)
                values[name].append(drawn.bias(out, wanted))
        for name, found in values.items():
            case = load.name
            yield {"arm": name, "model": "drawn", "case": case, "values": {"code_bias": found}}


JOBS = (
    *(Job(f"causes-{text}-{LENGTHS[0]}", Work("causes", text, LENGTHS[0], 3)) for text in TEXTS),
    *(Job(f"causes-{text}-{n}", Work("causes", text, n, 1)) for text in TEXTS for n in LENGTHS[1:]),
    *(Job(f"codes-{text}", Work("codes", text, CODES_LENGTH, 2)) for text in TEXTS),
    Job("calibration", Work("calibration")),
)
BENCHMARK = Benchmark(
    jobs=JOBS,
    measure=measure,
    limit_s=1200.0,
    options=(
        Option(
            "checkpoint",
            "folder of a model; SmolLM2-135M-Instruct without it",
            type=str,
            in_command=False,
        ),
        Option("device", "torch device that it runs on", "cpu", type=str),
        Option("times", "as many windows of each text", 1),
    ),
    gpu="unused",
)
