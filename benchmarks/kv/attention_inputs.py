"""q, k and v as real models make them, and attention over them in float64.

Shape suffixes: B queries, T tokens of a sequence, S tokens of all sequences, one after the other,
H KV heads, G query heads of a KV head, D head dim.
"""

import math
from dataclasses import dataclass

import torch

HEADS, GROUP, DIM = 8, 4, 128
"""Qwen3-8B's: 8 KV heads, 32 query heads."""
ROPE_BASE = 1e6
GAIN_SPREAD = 0.4
"""Standard deviation of the logarithm of QK-norm's weights."""
OUTLIER_CHANNELS = {"q": (17, 81), "k": (5, 69)}
"""RoPE turns the channels of a pair into each other."""
OUTLIER_GAIN = 5.0
BEYOND_HEADS = slice(0, 2)
"""KV heads whose K leaves E4M3's range in a case that says so, as K biases and norms make it."""
BEYOND = 1000.0
BEYOND_WEIGHT = 20.0
"""How much those channels count in q . k, beside 126 others of about 1."""
V_SPREAD = 0.8
"""Standard deviation of the logarithm of V's channels."""
FLAT = 0.3
"""K, and a needle's other scores, times this."""
V_OCTAVES = 4
"""V's heads differ by up to so many powers of two."""


@dataclass(frozen=True)
class Load:
    """What one step of attention reads."""

    batch: int
    context: int
    beyond: bool = False
    """Whether K has channels beyond 448."""
    queries: int = 1
    """The last tokens of each sequence, which attend to it up to themselves."""
    v_mean: float = 0.0
    """Of V's channels, in standard deviations. Of SmolLM2-135M's it is 0.22 in the median."""
    uneven: bool = False
    """Whether the context is that of the longest sequence, and others have any part of it."""
    softmax: str = "peaked"
    """Or "flat"; or "needle": a token at a tenth of the context has half of the weight."""

    @property
    def name(self) -> str:
        """The case in the result file."""
        return f"{self.batch}x{self.context}" + "".join(
            f", {what}"
            for what, is_so in (
                (f"last {self.queries}", self.queries > 1),
                ("K beyond 448", self.beyond),
                (f"V mean {self.v_mean:g}", self.v_mean),
                ("uneven", self.uneven),
                (self.softmax, self.softmax != "peaked"),
            )
            if is_so
        )

    @property
    def lengths_B(self) -> torch.Tensor:
        """Tokens of each sequence, int64, on the host."""
        if not self.uneven:
            return torch.full((self.batch,), self.context)
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0))
        return (order + 1) * self.context // self.batch

    def cache_bytes(self, itemsize: int) -> int:
        """K and V of all tokens."""
        return 2 * int(self.lengths_B.sum()) * HEADS * DIM * itemsize


@dataclass(frozen=True)
class Inputs:
    """BF16: q of the last tokens of each sequence, and everything that they attend to."""

    load: Load
    q_BHGD: torch.Tensor
    k_SHD: torch.Tensor
    v_SHD: torch.Tensor

    def amax_2H(self) -> torch.Tensor:
        """Largest magnitudes of K and V by KV head, FP32."""
        return torch.stack([x.abs().amax((0, 2)) for x in (self.k_SHD, self.v_SHD)]).float()


def draw(load: Load, device: str, seed: int = 0) -> Inputs:
    """The same values for the same seed on the same device, drawn a sequence at a time."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device)

    q_gain_HD, k_gain_HD = (_gain(normal(DIM), name).expand(HEADS, DIM).clone() for name in "qk")
    if load.beyond:
        channels = list(OUTLIER_CHANNELS["k"])
        k_gain_HD[BEYOND_HEADS, channels] = BEYOND
        q_gain_HD[BEYOND_HEADS, channels] = BEYOND_WEIGHT / BEYOND
    common_HD = normal(HEADS, DIM)  # keys of a head are alike in part
    v_gain_HD = torch.exp(V_SPREAD * normal(HEADS, DIM))
    v_gain_HD *= torch.exp2(-V_OCTAVES * torch.linspace(0, 1, HEADS, device=device))[:, None]

    tokens = load.batch * load.context
    k_SHD = torch.empty(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device)
    v_SHD = torch.empty_like(k_SHD)
    last = load.queries
    q_BHGD = torch.empty(load.batch * last, HEADS, GROUP, DIM, dtype=torch.bfloat16, device=device)
    positions_T = torch.arange(load.context, device=device)
    for sequence in range(load.batch):
        mine = slice(sequence * load.context, (sequence + 1) * load.context)
        k_THD = _rms_normed(normal(load.context, HEADS, DIM) + common_HD) * k_gain_HD
        k_SHD[mine] = _rotated(k_THD, positions_T)
        v_SHD[mine] = (normal(load.context, HEADS, DIM) + load.v_mean) * v_gain_HD
        q_THGD = _rms_normed(normal(last, HEADS, GROUP, DIM)) * q_gain_HD[:, None]
        rotated = _rotated(q_THGD.flatten(1, 2), positions_T[-last:])
        q_BHGD[sequence * last : (sequence + 1) * last] = rotated.view_as(q_THGD)
    if load.softmax != "peaked":
        _flatten(load, q_BHGD, k_SHD, v_SHD)
    return Inputs(load, q_BHGD, k_SHD, v_SHD)


def exact(inputs: Inputs) -> torch.Tensor:
    """``softmax(q . k / sqrt(D)) @ v`` in float64: BHGD."""
    device = inputs.q_BHGD.device
    out_BHGD = torch.empty(inputs.q_BHGD.shape, dtype=torch.float64, device=device)
    context, last = inputs.load.context, inputs.load.queries
    for sequence, length in enumerate(inputs.load.lengths_B.tolist()):
        positions_T = torch.arange(length, device=device)
        hidden_B11T = (positions_T > positions_T[-last:, None])[:, None, None]
        mine = slice(sequence * context, sequence * context + length)
        rows = slice(sequence * last, (sequence + 1) * last)
        k_THD, v_THD = inputs.k_SHD[mine].double(), inputs.v_SHD[mine].double()
        scores = torch.einsum("bhgd,thd->bhgt", inputs.q_BHGD[rows].double(), k_THD)
        weights = (scores * DIM**-0.5).masked_fill_(hidden_B11T, -torch.inf).softmax(-1)
        out_BHGD[rows] = torch.einsum("bhgt,thd->bhgd", weights, v_THD)
    return out_BHGD


def _flatten(load: Load, q_BHGD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor) -> None:
    """Scores near each other; a needle's is that of the sum of all others."""
    k_SHD *= FLAT
    if load.softmax == "needle":
        q_BHGD *= FLAT
        q_BHGD += 1
        needles = slice(load.context // 10, None, load.context)
        k_SHD[needles] += math.log(load.context) / DIM**0.5
        v_SHD[needles] *= 4


def bias(out: torch.Tensor, exact_BHGD: torch.Tensor) -> float:
    """Signed, relative: positive where outputs are too large."""
    error = out.double().view_as(exact_BHGD) - exact_BHGD
    return float((error * exact_BHGD.sign()).mean() / exact_BHGD.abs().mean())


def errors(out: torch.Tensor, exact_BHGD: torch.Tensor) -> dict[str, list[float]]:
    """Of each query: the relative L2 error, and the largest error over the largest output."""
    error = (out.double().view_as(exact_BHGD) - exact_BHGD).flatten(1)
    wanted = exact_BHGD.flatten(1)
    return {
        "kv_error": (error.norm(dim=1) / wanted.norm(dim=1)).tolist(),
        "kv_error_max": (error.abs().amax(1) / wanted.abs().amax(1)).tolist(),
    }


def off(
    out: torch.Tensor, meant_BHGD: torch.Tensor, wanted_BHGD: torch.Tensor
) -> dict[str, list[float]]:
    """What arithmetic and codes lose: against attention over what the codes mean, and over the
    values before they were codes."""
    return {
        "code_error": errors(out, meant_BHGD)["kv_error"],
        "code_bias": [bias(out, meant_BHGD)],
        "kv_error": errors(out, wanted_BHGD)["kv_error"],
    }


def _gain(normal_D: torch.Tensor, name: str) -> torch.Tensor:
    gain_D = torch.exp(GAIN_SPREAD * normal_D)
    gain_D[list(OUTLIER_CHANNELS[name])] *= OUTLIER_GAIN
    return gain_D


def _rms_normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotated(x_THD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """RoPE: channel ``d`` of the first half and of the second half are a pair."""
    half = DIM // 2
    frequency = ROPE_BASE ** -(torch.arange(half, device=x_THD.device) / half)
    angle_T1d = (positions_T[:, None] * frequency)[:, None]
    first, second = x_THD[..., :half], x_THD[..., half:]
    cos, sin = angle_T1d.cos(), angle_T1d.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
