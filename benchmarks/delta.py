"""What changed since the last update, found on the trainer's GPU and written on the engine's,
beside a full quantization pass.

A part of the bytes of an image is changed at random: of codes, scales and what stays BF16 alike.
All is what an update of engines on other hosts does with a trainer on one GPU, but for the network:

  quantize_ms    weights are quantized into the bucket, chunk by chunk, and nothing else
  changes_ms     the same; each chunk is compared with the image, and the records copied to the host
  busy_ms        of the latter, the time in which the GPU works, by a profiler; the rest is waiting
  commit_ms      the records are applied to the image
  engine_ms      an engine of one rank: the records are copied to its GPU and written where each
                 byte is stored, their elements are checked, what undoes them is copied to the host
  changes_ms of the arm "cpu"    chunks are copied to the host and compared there, without the GPU

The last is that of a few chunks, by bytes. Where a model's layers do not fit on the GPU beside
their image and the engine's storage, a part of them is measured and multiplied; embedding and head
are not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import measuring
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models, weights
from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.ops import delta
from sgl_fp8rl.ops.regions import whole
from sgl_fp8rl.protocol.image import Change, Image
from sgl_fp8rl.protocol.manifest import SLOTS
from sgl_fp8rl.weight_update.engine_weights import writer_for
from sgl_fp8rl.weight_update.routes import Route, RouteTable, shapes_of
from sgl_fp8rl.weight_update.shared_memory import Slot
from sgl_fp8rl.weight_update.weight_writer import UndoLog
from trainer_bridge import hf_names
from trainer_bridge.image_changes import ImageChanges
from trainer_bridge.layout import sources_for
from trainer_bridge.lookahead import Lookahead
from trainer_bridge.packer import QuantizePacker
from trainer_bridge.sources import Named
from trainer_bridge.transfer_plan import TransferPlan

DEVICE = "cuda"
SHARES = (0.002, 0.005, 0.013)
"""Of codes that change in a step, at learning rates of 1e-6 to 1e-5 (``benchmarks.flips``)."""
SAMPLED = 1
"""Chunks of a part that are measured on the host, which takes long."""
Values = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """One model."""

    model: str
    parts: int = 1
    """One of so many equal parts of its layers is measured."""


class Engine:
    """What an engine of one rank stores: each tensor as it is sent.

    Args:
        content: the chunks that it was sent.
    """

    def __init__(self, plan: TransferPlan, content: dict[int, torch.Tensor]) -> None:
        manifest, self._plan = plan.manifest, plan
        self.parameters = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=DEVICE)
            for name, spec in manifest.tensors.items()
        }
        shapes = shapes_of(manifest)
        boxes = {name: whole(shape) for name, shape in shapes.items()}
        routes = {name: [Route(name, box, name, box)] for name, box in boxes.items()}
        table = RouteTable(shapes, routes, self.parameters)
        device = next(iter(self.parameters.values())).device
        self._writer = writer_for(table, manifest, torch.bfloat16, device)
        for chunk, chunk_content in content.items():
            self._writer.write(chunk, self._slot(chunk, chunk_content))

    def change(self, payloads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Write what changes, and return what undoes it."""
        log: UndoLog = []
        self._writer.begin()
        for chunk, payload in payloads.items():
            self._writer.change(chunk, payload, log)
        self._writer.finish()
        self._writer.end()
        return dict(log)

    def holds(self, chunk: int, content: torch.Tensor) -> bool:
        """Whether these bytes of a chunk are stored."""
        sent = self._slot(chunk, content)
        specs = self._plan.manifest.tensors
        return all(
            torch.equal(
                self.parameters[each.name][slice(*each.rows)].view(torch.uint8),
                sent.tensor(each, specs[each.name]).view(torch.uint8),
            )
            for each in self._plan.chunks[chunk]
        )

    def _slot(self, chunk: int, content: torch.Tensor) -> Slot:
        return Slot(content, self._plan.extent(chunk)[0])


class Part:
    """Some parameters of a trainer, and what an update does with them.

    Args:
        times: how often the model has as many.
    """

    def __init__(
        self, named: Named, shape: models.Shape, times: int, chunk_bytes: int, layout: Any
    ) -> None:
        self.times = times
        self._tensors = [tensor for _, tensor in named]
        self.plan = TransferPlan(
            sources_for(named, shape.model_type, layout),
            [False] * len(named),
            chunk_bytes,
            by_tensor(layout["formats"]),
            range(len(named)),
            slots=SLOTS,
        )
        size = self.plan.manifest.bucket_bytes
        self._bucket = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        self._packer = QuantizePacker(self.plan, self._bucket, torch.bfloat16)
        self._before: dict[int, torch.Tensor] = {}

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Quantize: each chunk in its slot."""
        self._packer.begin()
        self._packer.put_residents(self._tensors)
        for chunk in range(len(self.plan.chunks)):
            self._packer.complete(chunk)
            offset, size = self.plan.extent(chunk)
            yield chunk, self._bucket[offset : offset + size]

    def quantize(self) -> None:
        """The pass that any update takes."""
        for _ in self.chunks():
            pass

    def image(self, share: float) -> Image:
        """What these weights are, but for a part of the bytes; in the same memory each time."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        for chunk, content in self.chunks():
            if chunk not in self._before:
                self._before[chunk] = torch.empty_like(content)
            drawn = torch.rand(content.shape, generator=generator, device=DEVICE)
            torch.bitwise_xor(content, (drawn < share).byte(), out=self._before[chunk])
            is_nan = self._before[chunk] & 0x7F == 0x7F  # as a code
            self._before[chunk][is_nan] = content[is_nan]
        return Image("before", dict(self._before))

    def changes(self, image: Image) -> ImageChanges:
        """What an update sends."""
        changes, ahead = ImageChanges([image], {image.name}), Lookahead[Change]()
        for chunk, content in self.chunks():
            list(ahead.push(changes.of(chunk, content)))
        list(ahead.drain())
        return changes

    def check(self, share: float) -> tuple[int, int]:
        """Bytes of the records, and of the image.

        Raises:
            RuntimeError: the records do not make the weights, or are not those of the CPU.
        """
        image = self.image(share)
        sent = size = 0
        for chunk, content in self.chunks():
            change = image.change_to(chunk, content)
            old = self._before[chunk].clone()
            if not change.is_delta:
                raise RuntimeError(f"chunk {chunk} has no delta; change less of it")
            delta.apply(old, change.payload.to(DEVICE))
            if not torch.equal(old, content):
                raise RuntimeError(f"the records of chunk {chunk} make other bytes")
            if chunk == len(self.plan.chunks) - 1:  # which is short: a CPU takes long
                same = delta.difference(self._before[chunk].cpu(), content.cpu())
                if same is None or not torch.equal(same, change.payload):
                    raise RuntimeError("the records are not those of the CPU")
            sent += change.payload.numel()
            size += content.numel()
        return sent, size

    def engine(self, share: float) -> tuple[Engine, dict[int, torch.Tensor]]:
        """An engine that holds the image, and the changes that it is sent.

        Raises:
            RuntimeError: they do not make the weights there.
        """
        image = self.image(share)
        engine = Engine(self.plan, self._before)
        changes = {n: image.change_to(n, content).payload for n, content in self.chunks()}
        undoing = engine.change(changes)
        if not all(engine.holds(n, content) for n, content in self.chunks()):
            raise RuntimeError("the records make other bytes on the engine")
        engine.change(undoing)
        if not all(engine.holds(n, content) for n, content in self._before.items()):
            raise RuntimeError("the engine does not go back")
        return engine, changes

    def sampled(self, share: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Chunks before and after, the former on the host, the latter on the GPU."""
        self.image(share)
        last = len(self.plan.chunks) - 1
        wanted = {round(last * n / (SAMPLED + 1)) for n in range(1, SAMPLED + 1)}
        return [
            (self._before[chunk].cpu(), content.clone())
            for chunk, content in self.chunks()
            if chunk in wanted
        ]


def measure(case: Case, run: Run) -> list[Measurement]:
    """Each share of changes."""
    shape = models.MODELS[case.model]
    layers = run.options["layers"] or shape.layers // case.parts
    parts = parts_of(shape, layers, run.options["chunk_mib"] << 20)
    repeats = run.options["repeats"]
    measurements: list[Measurement] = []
    copied = {"copy_tb_s": [measuring.copy_tb_s()]}
    for share in SHARES:
        found = summed([(part.times, values_of(part, share, repeats)) for part in parts])
        on_cpu = {"changes_ms": found.pop("cpu_ms")}
        full = median(found["quantize_ms"])
        together = zip(found["changes_ms"], found["commit_ms"], found["engine_ms"], strict=True)
        found["times_quantize"] = [sum(each) / full for each in together]
        found["of_image"] = [found["records_mb"][0] / found["image_mb"][0]]
        measurements += [
            {"arm": arm, "model": case.model, "case": f"{share:.1%}", "values": values}
            for arm, values in (("gpu", found | copied), ("cpu", on_cpu))
        ]
    # a profiler, once it was there, slows down every launch of its process
    for share, row in zip(SHARES, measurements[::2], strict=True):
        row["values"] |= summed([(part.times, busy(part, share)) for part in parts])
    return measurements


def parts_of(shape: models.Shape, layers: int, chunk_bytes: int) -> list[Part]:
    """Embedding and head, and ``layers`` layers."""
    few = replace(shape, layers=layers)
    names = [
        name
        for p in models.parameters(few)
        if p.fp8
        for name, _ in hf_names.split(p.name, p.shape, shape.model_type)
    ]
    kept: dict[str, Any] = {"fp32": [], "formats": {"block-fp8": names}}
    layout = {"dtype": "bfloat16", "skipped": [], "tied": None, **kept}
    named = [(n, p.detach()) for n, p in weights.bf16_module(few, DEVICE).named_parameters()]
    inside = [pair for pair in named if pair[0].startswith("model.layers.")]
    ends = [pair for pair in named if not pair[0].startswith("model.layers.")]
    return [
        Part(ends, shape, 1, chunk_bytes, layout),
        Part(inside, shape, math.ceil(shape.layers / layers), chunk_bytes, layout),
    ]


def values_of(part: Part, share: float, repeats: int) -> Values:
    """The values of each metric.

    Raises:
        RuntimeError: the records are wrong.
    """
    sent, size = part.check(share)
    found: Values = {"records_mb": [sent / 1e6], "image_mb": [size / 1e6]}
    found |= {"quantize_ms": [], "changes_ms": [], "commit_ms": []}
    part.changes(part.image(share))  # from now on there is host memory for the records
    for _ in range(repeats):
        image = part.image(share)
        found["quantize_ms"].append(measuring.timed(part.quantize)[0])
        took, changes = measuring.timed(partial(part.changes, image))
        found["changes_ms"].append(took)
        found["commit_ms"].append(measuring.timed(changes.commit)[0])
    engine, payloads = part.engine(share)
    found["engine_ms"] = []
    for _ in range(repeats):
        took, undoing = measuring.timed(partial(engine.change, payloads))
        found["engine_ms"].append(took)
        engine.change(undoing)
    del engine
    sampled = part.sampled(share)
    scale = size / sum(before.numel() for before, _ in sampled)
    on_cpu = [measuring.timed(partial(_on_cpu, *each))[0] for each in sampled]
    return found | {"cpu_ms": [scale * sum(on_cpu)]}


def busy(part: Part, share: float) -> Values:
    """Time in which the GPU works, from quantization to the copies of the records."""
    image = part.image(share)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        part.changes(image)
        torch.cuda.synchronize()
    run = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return {"busy_ms": [sum(event.self_device_time_total for event in run) / 1e3]}


def summed(parts: list[tuple[int, Values]]) -> Values:
    """The values of a model, of those of its parts and how often it has each."""
    (_, first), *_ = parts
    return {
        metric: [
            sum(times * value for (times, _), value in zip(parts, row, strict=True))
            for row in zip(*(values[metric] for _, values in parts), strict=True)
        ]
        for metric in first
    }


def _on_cpu(before: torch.Tensor, after: torch.Tensor) -> None:
    """Copy a chunk to the host, and compare it there."""
    delta.difference(before, after.cpu())


BENCHMARK = Benchmark(
    jobs=tuple(Job(case.model, case) for case in (Case("qwen3-8b"), Case("qwen3-30b-a3b", 4))),
    measure=measure,
    limit_s=90.0,
    options=(
        Option("repeats", "of each pass", default=7),
        Option("chunk_mib", "size of a slot of the bucket", default=512),
        LAYERS,
    ),
)
