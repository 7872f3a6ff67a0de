"""What another SGLang changed of what this package uses, on one page.

    make drift SGLANG=0.5.24
    python -m tests.drift WHEEL... --base WHEEL... [--python PYTHON...] [--page FILE]

Wheels, or folders that SGLang is installed in, are read: names and signatures of all that
``compat`` lists. A tested version (``--base``, by age) that has the same, or lacks the same, means
that nothing changed; a version is never its own base. ``--python`` is of an environment with one of
these SGLangs and this package: tests of what SGLang resolves run there, and a server starts on the
CPU.
"""

import argparse
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat.hook_targets import HARMLESS_UPDATES, NEWER_UPDATES
from tests import run as suites
from tests.drift.ours import Ours
from tests.drift.sources import Function, Sources, members

KERNELS = {name: (getattr(compat, name),) for name in ("SHARED_EXPERT_GATE", "LOGITS_CAP")}
HOOKED = {name: (target,) for name, target in compat.HOOK_TARGETS.items()} | KERNELS
HOOKED |= {"FLASHINFER_PLANS": compat.FLASHINFER_PLANS}
BACKENDS = compat.ATTENTION_BACKENDS.values()
WRAPPED = (
    *(target for targets in HOOKED.values() for target in targets),
    *compat.STOCK_UPDATES,
    *compat.DECODED_ATTENTION,
    *(f"{each}.forward_{phase}" for each in BACKENDS for phase in ("extend", "decode")),
)
TARGETS = (*WRAPPED, *compat.METHODS)
PATHS = {path: name for name, path in compat.SYMBOLS.items()} | {
    compat._target_path(target): target.rpartition(".")[2] for target in TARGETS
}
"""The name by which our code calls what is there."""
OWNED = [
    (compat._target_path(owner), name)
    for owner, names in compat.ATTRIBUTES.items()
    for name in names.split()
]
"""Attributes, each with its owner."""
START = (
    "--verbose",
    "tests/engine/test_commands.py::test_a_command_starts_what_is_updated[serve]",
)
PINS = {"torch": "torch", "flashinfer_python": "FlashInfer", "transformers": "transformers"}
SECTIONS = {
    "gone": "name in `sgl_fp8rl/engine/compat` what took its place, and use that",
    "moved": "its class does not define or set it any more, and the files named do, which did not "
    "before. See that objects still have it",
    "unfit": "called in another way, and what is named of ours does not take every call. Change "
    "that, or see that SGLang's calls fit",
    "unmet": "changed, and no call or hook of ours is known to meet it. See what uses it",
    "tolerated": "",
}
"""What to do, by kind of change; nothing about those that are counted only."""
INTRODUCTION = """\
Names and signatures of {symbols} symbols and functions and {attributes} attributes, read in the wheels and not
imported. Where a tested version ({tested}) has the same or lacks the same, nothing changed; a version is never its own
base. Signatures are told beside the nearest older one. Tolerated: called in another way, which fits what is known of
ours.

Wheels do not show what is inherited from other packages, attributes of classes that code makes (these count as moved),
types, values, and what a function does. An attribute counts as there where its class or a base sets it on any object.
Not judged, since not every tested version shows it: {unseen}. The tests show the rest."""  # noqa: E501


@dataclass
class Drift:
    """What changed in one version: lines of Markdown by the kinds of ``SECTIONS``."""

    new: Sources
    lines: dict[str, list[str]]
    ran: list[suites.Result] = field(default_factory=list)


class Suite(suites.Suite):
    """In an environment of any place."""

    is_installed = True


def compare(new: Sources, tested: Sequence[Sources], ours: Ours) -> Drift:
    """What of ``new`` differs from each other version."""
    lines: dict[str, list[str]] = {kind: [] for kind in SECTIONS}
    bases = [base for base in tested if base.version != new.version]
    if not bases:
        raise SystemExit(f"--base has SGLang {new.version} alone: name another version too")
    missing: dict[str, set[str]] = defaultdict(set)
    for path in PATHS:
        if path not in new.shapes and all(path in base.shapes for base in bases):
            owner, _, name = dotted(path).rpartition(".")
            missing[owner].add(name)
    for owner, name in OWNED:
        if name not in new.owned[owner] and all(name in base.owned[owner] for base in bases):
            if new.find(owner) is None:
                owner, name = re.split("[.:](?=[^.:]*$)", owner)
            missing[dotted(owner)].add(name)
    older = [base for base in bases if compat._release(base.version) < compat._release(new.version)]
    nearest = (older or bases)[-1]
    for owner, names in missing.items():
        siblings = {name for each, name in OWNED if dotted(each) == owner} | names
        package = "/".join(owner.split(".")[:2])
        places = {name: new_places(name, package, new, nearest) for name in sorted(siblings)}
        gone = [name for name in sorted(names) if not places[name]]
        moved = [name for name in sorted(names) if places[name]]
        lines["gone"] += [f"`{owner}`: {', '.join(gone)}"] if gone else []
        among = {file for name in moved for file in places[name]}
        counts = Counter(file for files in places.values() for file in files if file in among)
        to = ", ".join(f"`{file}`" for file, _ in counts.most_common(3))
        lines["moved"] += [f"`{owner}`: {', '.join(moved)}; {to}"] if moved else []
    for path, shape in new.shapes.items():
        found = [base.shapes.get(path) for base in (nearest, *bases)]
        old = [each for each in found if each]
        if not old or shape in found:
            continue
        target = dotted(path)
        if shape is None:
            lines["unmet"].append(f"`{target}`: no function, or no class whose fields are seen")
            continue
        name = PATHS.get(path, target.rpartition(".")[2])
        unfit = [ours.unfit(target, name, each, shape) for each in old]
        line = f"`{target}`: {shape.since(old[0])}"
        is_class = bool(new.classes(new.find(path)))  # one that we do not make is read
        if all(unfit) or all(shape.kinds != each.kinds for each in old):
            lines["unfit"].append(line + (f": {', '.join(unfit[0])}" if unfit[0] else ""))
        elif target in WRAPPED and target not in ours.hooked:
            lines["unmet"].append(line)
        elif None not in unfit or is_class or shape.serves(old[0]):
            lines["tolerated"].append(f"`{'.'.join(target.split('.')[-2:])}`")
        else:
            lines["unmet"].append(line)
    known = {*TARGETS, *NEWER_UPDATES, *(f"{compat.UPDATER}.{name}" for name in HARMLESS_UPDATES)}
    for each in new.classes(new.find(compat._target_path(compat.UPDATER))):
        for name, node in members(each.node).items():
            target = f"{compat.UPDATER}.{name}"
            if isinstance(node, Function) and name[0] != "_" and target not in known:
                lines["unmet"].append(f"`{target}`: new, and may change weights")
    return Drift(new, lines)


def our_code() -> Ours:
    packages = ("sgl_fp8rl", "trainer_bridge")  # the latter calls an engine
    files = [file for package in packages for file in (suites.ROOT / package).rglob("*.py")]
    return Ours({str(f.relative_to(suites.ROOT)): f.read_text() for f in files}, HOOKED)


def dotted(path: str) -> str:
    return path.replace(":", ".")


def new_places(name: str, package: str, new: Sources, old: Sources) -> list[str]:
    """Files of a package that define a name and did not before."""
    return [
        file
        for file, names in new.definitions.items()
        if file.startswith(package) and name in names and name not in old.definitions.get(file, ())
    ]


def run(python: Path, version: str) -> list[suites.Result]:
    """Tests of what SGLang resolves, and the start of a server on the CPU.

    Args:
        python: the environment's.
        version: of SGLang, which it must have.
    """
    folder = str(python.absolute().parents[1])
    fast = (*suites.FAST, *suites.OF_SETTINGS)
    names = {"tests of what it resolves": fast, "start on the CPU": START}
    return [suites.run(Suite(n, version, a, environment=folder), ()) for n, a in names.items()]


def installed(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('sglang'))"
    command = [str(python), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def page(drifts: Sequence[Drift], tested: Sequence[Sources], command: str) -> str:
    seen = [
        (owner, name, all(name in base.owned[owner] for base in tested)) for owner, name in OWNED
    ]
    unseen = Counter(owner.partition(":")[2] for owner, _, is_seen in seen if not is_seen)
    introduction = INTRODUCTION.format(
        unseen=", ".join(f"{count} of `{owner}`" for owner, count in unseen.items()) or "nothing",
        symbols=len(PATHS),
        attributes=len(OWNED),
        tested=" and ".join(base.version for base in tested),
    )
    columns = ["SGLang", *PINS.values(), *SECTIONS, "tests, start"]
    lines = [
        "# What SGLang changed of what this package uses",
        "",
        f"`{command}`, {datetime.now(timezone.utc):%Y-%m-%d} (UTC), commit {suites.commit()}",
        "",
        introduction,
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    for each in drifts:
        ran = ", ".join(result.verdict for result in each.ran) or "not run"
        pins = [each.new.pins.get(name, "") for name in PINS]
        counts = [str(len(found)) for found in each.lines.values()]
        lines.append(f"| {' | '.join([each.new.version, *pins, *counts, ran])} |")
    for each in drifts:
        listed = {kind: found for kind, found in each.lines.items() if found and SECTIONS[kind]}
        lines += ["", f"## {each.new.version}"] if listed or each.ran else []
        for kind, found in listed.items():
            lines += ["", f"**{kind}**: {SECTIONS[kind]}:", "", *(f"- {line}" for line in found)]
        for r in each.ran:
            said = f"**{r.suite.name}**: {r.verdict}: {r.passed} passed, {r.failed} failed"
            lines += ["", f"{said}, {r.skipped} skipped, {suites.duration(r.seconds)}"]
            lines += ["", *(f"- {failure}" for failure in r.failures)] if r.failures else []
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--base", type=Path, nargs="+", required=True, help="tested, oldest first")
    parser.add_argument("--python", type=Path, nargs="*", default=[], help="of environments")
    parser.add_argument("--page", type=Path, help="write the page there too")
    arguments = parser.parse_args(argv)
    tested = [Sources(path, PATHS, OWNED) for path in arguments.base]
    ours = our_code()
    drifts = [compare(Sources(path, PATHS, OWNED), tested, ours) for path in arguments.wheels]
    pythons = {installed(python): python for python in arguments.python}
    if unknown := pythons.keys() - {drift.new.version for drift in drifts}:
        parser.error(f"--python has SGLang {min(unknown)}: give its wheel too")
    for drift in drifts:
        if drift.new.version in pythons:
            drift.ran = run(pythons[drift.new.version], drift.new.version)
    versions = " ".join(drift.new.version for drift in drifts)
    ran = " ".join(drift.new.version for drift in drifts if drift.ran)
    command = f'make drift SGLANG="{versions}"' + (f' TESTS="{ran}"' if ran else "")
    text = page(drifts, tested, command)
    print(text)
    if arguments.page:
        arguments.page.write_text(text)


if __name__ == "__main__":
    main()
