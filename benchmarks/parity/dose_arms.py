"""The arms of the study of doses, the most telling first: a machine may be given back early.

Where ``fp8_forward`` is an arm, planted doses have BF16 KV: one kind of mismatch at a time. The
smallest dose is that of an FP8 cache, unplanted.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.parity.arms import ALL_BF16, ARMS, CORRECTED, KV8, MASKED, UNCORRECTED, Arm

DOSES = {"5e-2": 5e-2, "1e-2": 1e-2, "3e-3": 3e-3, "1e-3": 1e-3}
"""Nats a token. Published FP8 runs report 2.8e-3 to 1.1e-2."""
FATAL = 0.5
"""Of the positive control: the engine samples from another policy altogether."""
CORRECTIONS = {"none": UNCORRECTED, "tis": CORRECTED, "mis": MASKED}
MINI_BATCHES = 4
# SGLang's own choice; where FlashInfer decodes beside other runs, stock SGLang has the race of
# docs/parity.md
STOCK_ENGINE: dict[str, Any] = {"attention_backend": None}


def _dense() -> Iterator[Arm]:
    yield ARMS["bf16"]
    yield Arm("stock", "bf16", "dense", ALL_BF16, engine=STOCK_ENGINE, stock=True, predicted="same")
    uncorrected = partial(Arm, reference="bf16", correction=UNCORRECTED)
    for name, dose in DOSES.items():
        alarm = {"5e-2": True, "1e-2": None, "3e-3": None, "1e-3": False}[name]
        for kind, correction in CORRECTIONS.items():
            made = Arm(f"{name}-{kind}", "bf16", correction=correction, dose=dose, must_alarm=alarm)
            yield replace(made, predicted="worse" if made.name == "5e-2-none" else "same")
        removed = uncorrected(f"{name}-fp8-forward", dose=dose, fp8_forward=True, predicted="same")
        yield replace(removed, must_alarm=None if alarm else alarm)
    yield uncorrected("fatal-none", dose=FATAL, must_alarm=True, predicted="worse")
    # as far apart, but it is the trainer that computes in FP8: what samples is as good as ever
    for name in ("5e-2", "1e-2"):
        yield uncorrected(
            f"{name}-fp8-trainer",
            dose=DOSES[name],
            fp8_forward=True,
            ignored_layers=ALL_BF16,
            must_alarm=None,
            predicted="same",
        )

    grows = replace(uncorrected("grows-none", engine=KV8), dose=DOSES["1e-3"], grows=True)
    held = replace(grows, name="grows-controlled", correction=CORRECTED, controlled=True)
    yield replace(held, must_alarm=None, predicted="same")
    yield replace(grows, must_alarm=True, predicted="worse")
    tis = replace(grows, name="grows-tis", correction=CORRECTED)
    yield replace(tis, must_alarm=None, predicted="worse")

    for kind, correction in CORRECTIONS.items():
        yield Arm(f"kv8-{kind}", "bf16", correction=correction, engine=KV8, predicted="same")
    yield uncorrected("kv8-fp8-forward", engine=KV8, fp8_forward=True, predicted="same")

    mild: dict[str, Any] = {"dose": DOSES["1e-2"], "predicted": "same", "must_alarm": None}
    bf16 = partial(Arm, reference=None, ignored_layers=ALL_BF16, must_alarm=None)
    yield bf16("stale-bf16", mini_batches=MINI_BATCHES)
    for kind in ("none", "tis"):
        made = Arm(f"stale-1e-2-{kind}", "stale-bf16", correction=CORRECTIONS[kind], **mild)
        yield replace(made, mini_batches=MINI_BATCHES)
    yield bf16("retract-bf16", retract=True)
    yield Arm("retract-1e-2-tis", "retract-bf16", retract=True, **mild)


def _experts(model: str) -> Iterator[Arm]:
    """With FP8 KV, since nothing here computes ``fp8_forward``."""
    yield Arm(f"{model}-bf16", None, model, ALL_BF16)
    for dose in (DOSES["1e-2"], None):
        for kind in ("none", "tis"):
            yield Arm(
                f"{model}-{'kv8' if dose is None else '1e-2'}-{kind}",
                f"{model}-bf16",
                model,
                correction=CORRECTIONS[kind],
                engine=KV8,
                dose=dose,
                must_alarm=False if dose is None else None,
                predicted="same",
            )


DOSE_ARMS = {arm.name: arm for arm in (*_dense(), *_experts("moe"), *_experts("moe32"))}
LONG_ARMS = ("bf16", "kv8-none", "kv8-tis", "kv8-fp8-forward")
"""Of the study of long responses: two on a GPU."""
STUDIES = {
    "parity": ARMS,
    "doses": DOSE_ARMS,
    "long": {name: DOSE_ARMS[name] for name in LONG_ARMS},
}
ALL_ARMS = {**ARMS, **DOSE_ARMS}
"""A name stands for the same arm in each study."""
