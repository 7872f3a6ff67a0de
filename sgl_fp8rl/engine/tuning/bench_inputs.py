"""Inputs that GEMMs are measured on: operands for one (N, K), the error and the time of a kernel.

Each 128x128 block of the weight has its own scale, so that a kernel that reads a wrong scale is
caught. There are two sets of activations: normal, and with outliers like those of checkpoints (a
few channels a hundred times larger, a few large tokens).
"""

import statistics
from collections.abc import Callable

import torch

from sgl_fp8rl.engine.gemm.candidates import Kernel
from sgl_fp8rl.ops.activation import Quantized, quantize_tokens
from sgl_fp8rl.ops.reference import (
    BLOCK,
    FP8_DTYPE,
    FP8_MAX,
    dequantize_activation,
    dequantize_weight,
)

Timer = Callable[[Callable[[int], object], int], float]
"""``timer(run, sets)``: the time in microseconds of one ``run(i)``, i cycling through ``sets``."""

ROTATED_BYTES = 200 << 20
"""Bytes of rotating weights: four times the L2 cache of a Hopper GPU."""
CHECKED_ROWS = 64
"""Rows that are compared, evenly spread: every 260th of 16384."""
CHECKED_COLUMNS = 4096
"""Columns of the reference computed at a time, to bound its memory."""
OUTLIER_CHANNELS = 4
OUTLIER = 100.0
HOT_TOKENS = 3
HOT = 30.0
WARM_UPS = 3
"""Lets the clock rise again after a compilation, during which the GPU idled."""
REPLAYS = 10
GRAPH_US = 1000.0
"""Approximate length of a CUDA graph, so that its launch does not matter."""


def difference(y_MN: torch.Tensor, reference_MN: torch.Tensor) -> float:
    """The maximum of ``1 - 2 x.y / (x.x + y.y)`` in FP64 over blocks of 128 columns of a row.

    This is 1 - cosine for vectors of equal length and larger otherwise, so a bound on it bounds
    1 - cosine and catches wrong scales. By blocks, since one wrong tile would hardly change the
    cosine of the whole, and large rows would outweigh the others. Infinite if either is NaN.
    """
    y, reference = (t.double().unflatten(-1, (-1, BLOCK)) for t in (y_MN, reference_MN))
    lengths = (y * y).sum(-1) + (reference * reference).sum(-1)
    dots = (y * reference).sum(-1)
    both_zero = lengths == 0
    ones = torch.ones_like(lengths)
    worst = float((1 - torch.where(both_zero, ones, 2 * dots / lengths)).amax())
    return worst if worst == worst else float("inf")


def random_weight(n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[N, K]`` and scales ``[N/128, K/128]`` on the generator's device."""
    codes_NK = _normal((n, k), generator).mul_(FP8_MAX / 4).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    exponents = torch.rand(
        n // BLOCK,
        k // BLOCK,
        generator=generator,
        device=generator.device,
        dtype=torch.float32,
    )
    return codes_NK, torch.exp2(2 * exponents - 1) / FP8_MAX


def random_activations(m: int, k: int, generator: torch.Generator) -> list[torch.Tensor]:
    """BF16 ``[M, K]``: normal values, and values with outliers."""
    normal_MK = _normal((m, k), generator)
    outlier_MK = normal_MK.clone()
    outlier_MK[:, :: max(1, k // OUTLIER_CHANNELS)] *= OUTLIER
    outlier_MK[:: max(1, m // HOT_TOKENS)] *= HOT
    return [normal_MK, outlier_MK]


def _normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


def checked_rows(m: int) -> torch.Tensor:
    """Indices of the rows that are compared."""
    return torch.linspace(0, m - 1, min(m, CHECKED_ROWS), dtype=torch.float64).round().long()


def copies(weight_NK: torch.Tensor) -> int:
    """How many copies of this weight to rotate, so that none is read from the L2 cache."""
    on_cpu = weight_NK.device.type == "cpu"
    return 1 if on_cpu else -(-ROTATED_BYTES // weight_NK.numel())


def free_captured(device: torch.device) -> None:
    """Free the memory of captured graphs; each had its own."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class BenchInputs:
    """Rotating weights of one (N, K), and activations of any M."""

    def __init__(self, n: int, k: int, device: str, timer: Timer, seed: int = 0) -> None:
        self.n, self.k, self._timer = n, k, timer
        self._generator = torch.Generator(device).manual_seed(seed)
        weight_NK, scales_nk = random_weight(n, k, self._generator)
        sets = max(2, copies(weight_NK))
        self.weights = [(weight_NK.clone(), scales_nk.clone()) for _ in range(sets)]
        self._activations: tuple[int, list[Quantized]] | None = None
        self._references: tuple[int, torch.Tensor, list[torch.Tensor]] | None = None

    def activations(self, m: int) -> list[Quantized]:
        """Codes and scales of normal values, and of values with outliers."""
        if self._activations is None or self._activations[0] != m:
            self._activations = self._references = None
            free_captured(self._generator.device)
            made = random_activations(m, self.k, self._generator)
            self._activations = m, [quantize_tokens(x_MK) for x_MK in made]
        return self._activations[1]

    def _reference(self, m: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Indices of the compared rows, and their results in FP64, for each activation."""
        if self._references is None or self._references[0] != m:
            rows = checked_rows(m).to(self._generator.device)
            weight_NK, scales_nk = self.weights[0]
            xs = [
                dequantize_activation(*take_rows(tokens, rows), torch.float64)
                for tokens in self.activations(m)
            ]
            parts: list[list[torch.Tensor]] = [[] for _ in xs]
            for begin in range(0, self.n, CHECKED_COLUMNS):
                end = min(begin + CHECKED_COLUMNS, self.n)
                blocks = scales_nk[begin // BLOCK : end // BLOCK]
                w = dequantize_weight(weight_NK[begin:end], blocks, torch.float64)
                for part, x in zip(parts, xs, strict=True):
                    part.append(x @ w.T)
            self._references = m, rows, [torch.cat(part, dim=1) for part in parts]
        return self._references[1], self._references[2]

    def error(self, kernel: Kernel, m: int) -> float:
        """The kernel's :func:`difference` from the FP64 result."""
        rows, references = self._reference(m)
        worst = 0.0
        for (codes, scales), reference in zip(self.activations(m), references, strict=True):
            found = kernel(codes, scales, *self.weights[0])[rows]
            worst = max(worst, difference(found, reference))
        return worst

    def time_us(self, kernel: Kernel, m: int) -> float:
        """Microseconds of one GEMM including its launch, with codes ready."""
        codes, scales = self.activations(m)[0]
        return self._timer(lambda i: kernel(codes, scales, *self.weights[i]), len(self.weights))


def take_rows(tokens: Quantized, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of these rows."""
    codes = tokens.codes_MK.view(torch.uint8)[rows]  # FP8 itself is not indexed everywhere
    return codes.view(FP8_DTYPE), tokens.scales_Mk[rows]


def cuda_graph_us(run: Callable[[int], object], sets: int) -> float:
    """Microseconds of one ``run(i)`` inside a CUDA graph, median of several replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        run(0)
        start.record()
        for i in range(sets):
            run(i)
        end.record()
    end.synchronize()
    rounds = max(1, min(8, round(GRAPH_US / (start.elapsed_time(end) * 1000))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # torch.cuda.graph would empty the allocator's cache each time, which takes longer
        graph.capture_begin()
        try:
            for i in range(sets * rounds):
                run(i % sets)
        finally:
            graph.capture_end()
    for _ in range(WARM_UPS):
        graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (sets * rounds))
    return statistics.median(times)
