"""Inputs that tiles of experts are measured on: the error and the time of each GEMM of one shape.

As for linears (``bench_inputs``), there are normal activations and some with outliers. Routes are
balanced as by a trained router: each token takes T experts, all equally likely.

Shape suffixes: M tokens, T experts per token, R = M * T rows, N x K the weight of one expert.
"""

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.candidates import Config
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape
from sgl_fp8rl.engine.gemm.experts import expert_gemm
from sgl_fp8rl.engine.tuning.bench_inputs import (
    ROTATED_BYTES,
    Timer,
    checked_rows,
    copies,
    difference,
    free_captured,
    random_activations,
    random_weight,
    take_rows,
)
from sgl_fp8rl.ops.activation import Quantized, quantize_tokens
from sgl_fp8rl.ops.reference import dequantize_activation, dequantize_weight

GEMMS = ("gate_up", "down")


def bench_input_bytes(shape: ExpertShape) -> int:
    """Limit of the device memory of ``ExpertBenchInputs``, also while weights are generated."""
    codes = 3 * shape.experts * shape.hidden * shape.intermediate
    return 4 * codes + 2 * ROTATED_BYTES


class Weights:
    """Rotating weights of one GEMM of all experts."""

    def __init__(self, experts: int, n: int, k: int, generator: torch.Generator) -> None:
        codes, scales = random_weight(experts * n, k, generator)
        codes, scales = (t.unflatten(0, (experts, -1)) for t in (codes, scales))
        self.sets = [(codes, scales)]
        self.sets += [(codes.clone(), scales.clone()) for _ in range(1, copies(codes))]
        self.n, self.k = n, k


class Batch:
    """The activations of M tokens, and several rotating routings."""

    def __init__(self, shape: ExpertShape, m: int, routings: int, random: torch.Generator) -> None:
        E, H, I, T = shape  # noqa: E741
        self.m = m
        rows = {"gate_up": (m, H), "down": (m * T, I)}
        self.tokens: dict[str, list[Quantized]] = {
            name: [quantize_tokens(x, by_row=True) for x in random_activations(*size, random)]
            for name, size in rows.items()
        }
        self.routings = []
        for _ in range(routings):
            chosen = torch.rand(m, E, generator=random, device=random.device).topk(T)
            weights_MT = chosen.values / chosen.values.sum(-1, keepdim=True)
            self.routings.append((weights_MT, chosen.indices.int()))
        self.rows = checked_rows(m * T).to(random.device)
        """Indices of the rows that are compared."""
        self.references: dict[str, list[torch.Tensor]] = {}


class ExpertBenchInputs:
    """Weights of one shape of experts, and batches of any number of tokens."""

    def __init__(self, shape: ExpertShape, device: str, timer: Timer) -> None:
        E, H, I, _ = shape  # noqa: E741
        self._shape, self._timer = shape, timer
        self._generator = torch.Generator(device).manual_seed(0)
        self._weights = {
            "gate_up": Weights(E, 2 * I, H, self._generator),
            "down": Weights(E, H, I, self._generator),
        }
        self._batch: Batch | None = None

    def _of(self, m: int) -> Batch:
        if self._batch is None or self._batch.m != m:
            self._batch = None
            free_captured(self._generator.device)
            E, H, I, T = self._shape  # noqa: E741
            touched = min(E, m * T) * H * I  # of the smaller weight, in bytes
            routings = max(2, -(-ROTATED_BYTES // touched))
            self._batch = Batch(self._shape, m, routings, self._generator)
        return self._batch

    def error(self, name: str, config: Config, m: int) -> float:
        """The ``bench_inputs.difference`` of the GEMM from the FP64 result."""
        batch = self._of(m)
        routes = self._routes(batch, 0, config["BLOCK_SIZE_M"])
        worst = 0.0
        for tokens, reference in zip(batch.tokens[name], self._references(name, m), strict=True):
            out_RN = self._out(name, m).fill_(torch.nan)  # catches unwritten elements
            self._run(name, config, 0, tokens, routes, out_RN)
            worst = max(worst, difference(out_RN[batch.rows], reference))
        return worst

    def time_us(self, name: str, config: Config, m: int) -> float:
        """Microseconds of one GEMM including its launch, with routes and codes ready."""
        batch = self._of(m)
        sets = range(len(batch.routings))
        routes = [self._routes(batch, i, config["BLOCK_SIZE_M"]) for i in sets]
        tokens, out_RN = batch.tokens[name][0], self._out(name, m)
        return self._timer(
            lambda i: self._run(name, config, i, tokens, routes[i], out_RN), len(sets)
        )

    def align_us(self, block: int, m: int) -> float:
        """Microseconds of sorting the rows by expert for tiles of ``block`` rows."""
        batch = self._of(m)
        return self._timer(lambda i: self._routes(batch, i, block), len(batch.routings))

    def _routes(self, batch: Batch, i: int, block: int) -> tuple[torch.Tensor, ...]:
        weights_MT, ids_MT = batch.routings[i]
        return weights_MT, ids_MT, *compat.moe_align_block_size(ids_MT, block, self._shape.experts)

    def _out(self, name: str, m: int) -> torch.Tensor:
        shape = m * self._shape.top_k, self._weights[name].n
        return torch.empty(shape, dtype=torch.bfloat16, device=self._generator.device)

    def _rows_of_token(self, name: str) -> int:
        return self._shape.top_k if name == "gate_up" else 1

    def _run(
        self,
        name: str,
        config: Config,
        i: int,
        tokens: Quantized,
        routes: tuple[torch.Tensor, ...],
        out_RN: torch.Tensor,
    ) -> None:
        sets = self._weights[name].sets
        weight = sets[i % len(sets)]
        expert_gemm(tokens, *weight, out_RN, routes, self._rows_of_token(name), config)

    def _references(self, name: str, m: int) -> list[torch.Tensor]:
        """The compared rows in FP64, for each activation."""
        batch = self._of(m)
        if name not in batch.references:
            weights_MT, ids_MT = batch.routings[0]
            codes, scales = self._weights[name].sets[0]
            expert_R = ids_MT.flatten()[batch.rows]
            token_R = batch.rows // self._rows_of_token(name)
            xs = [
                dequantize_activation(*take_rows(tokens, token_R), torch.float64)
                for tokens in batch.tokens[name]
            ]
            shape = len(batch.rows), self._weights[name].n
            ys = [x.new_empty(shape) for x in xs]
            for expert in expert_R.unique().tolist():
                mine = expert_R == expert
                w_NK = dequantize_weight(codes[expert], scales[expert], torch.float64)
                for x, y in zip(xs, ys, strict=True):
                    y[mine] = x[mine] @ w_NK.T
            if name == "down":
                for y in ys:
                    y *= weights_MT.flatten()[batch.rows, None]
            batch.references[name] = ys
        return batch.references[name]
