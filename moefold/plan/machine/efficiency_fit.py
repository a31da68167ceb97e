"""Shares of a GPU's peaks, fitted to what was timed on one. Torch-free: `moefold bench calibrate` brings the points.

Every curve has one or two numbers, so a coarse search that narrows is enough: least squares of the log of time, in
which 10 % too fast and 10 % too slow weigh the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from moefold.plan.machine.gpu import roofline_seconds

EXPERT_TILE_ROWS = 128  # rows of experts are worked on in tiles: half a one is empty for each expert
HALF_RATE_HEAD_WIDTH = 64  # width of a head at which attention's exponentials take as long as its products


@dataclass(frozen=True)
class TimedKernel:
    """A kernel that took `seconds`: products have rows, n, k and groups, attention a length and a width of heads."""

    what: str  # gemm, grouped, attention_forward, attention_backward, stream
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    precision: str = "bf16"
    length: int = 0
    width: int = 0
    rows: float = 0.0  # of one group

    @property
    def padded_flops(self) -> float:
        """FLOPs with the rows that fill tiles."""
        return self.flops * (1 + EXPERT_TILE_ROWS / 2 / self.rows) if self.what == "grouped" else self.flops


def mean_squared_log_error(points: Sequence[TimedKernel], predict: Callable[[TimedKernel], float]) -> float:
    """Mean square of the log of predicted over measured time."""
    return mean(math.log(predict(point) / point.seconds) ** 2 for point in points)


def minimize_unimodal(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f is least, for f with one valley, by narrowing."""
    for _ in range(60):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if f(a) < f(b) else (a, high)
    return (low + high) / 2


def fit_flop_rate(points: Sequence[TimedKernel], hbm: float, blend: float) -> float:
    """FLOP/s that large products tend to."""
    best = max(point.padded_flops / point.seconds for point in points)

    def error_at_log_rate(log: float) -> float:
        return mean_squared_log_error(
            points, lambda t: roofline_seconds(t.padded_flops / math.exp(log), t.bytes / hbm, blend)
        )

    return math.exp(minimize_unimodal(error_at_log_rate, math.log(best / 20), math.log(best * 20)))


def fit_roofline_blend(sets: Sequence[Sequence[TimedKernel]], hbm: float) -> float:
    """How the two limits of the roofline blend, one number for sets of products that each have their own rate."""

    def fitting_error(blend: float) -> float:
        rates = [fit_flop_rate(points, hbm, blend) for points in sets]
        return sum(
            len(points)
            * mean_squared_log_error(
                points, lambda t, rate=rate: roofline_seconds(t.padded_flops / rate, t.bytes / hbm, blend)
            )
            for points, rate in zip(sets, rates, strict=True)
        )

    return min((1 + at / 20 for at in range(61)), key=fitting_error)


def fit_attention_rate(points: Sequence[TimedKernel], half: float) -> float:
    """FLOP/s that attention tends to, where it reaches half at `half` tokens."""
    return math.exp(mean(math.log(t.flops / t.seconds / attention_efficiency(t.length, t.width, half)) for t in points))


def fit_half_rate_length(points: Sequence[TimedKernel]) -> float:
    """The length at which attention reaches half of what it tends to."""

    def fitting_error(half: float) -> float:
        rate = fit_attention_rate(points, half)
        return mean_squared_log_error(points, lambda t: t.flops / rate / attention_efficiency(t.length, t.width, half))

    return minimize_unimodal(fitting_error, 1.0, 20_000.0)


def attention_efficiency(length: float, width: float, half: float) -> float:
    """The share of its rate that attention reaches at this length and width of heads."""
    return length / (length + half) * width / (width + HALF_RATE_HEAD_WIDTH)


def fit_efficiencies(
    points: Sequence[TimedKernel], peak: dict[str, float], hbm: float, start: float
) -> dict[str, object]:
    """The `kernels` section of a GPU's file. `peak` is by precision here."""
    of = {what: [t for t in points if t.what == what] for what in {t.what for t in points}}
    plain = [t for t in of["gemm"] if t.precision == "bf16"]
    blend = fit_roofline_blend([plain, of["grouped"]], hbm)
    rate = fit_flop_rate(plain, hbm, blend)
    shares = {"bf16": rate / peak["bf16"]}
    for precision in sorted({t.precision for t in of["gemm"]} - {"bf16"}):
        low = [t for t in of["gemm"] if t.precision == precision]
        shares[precision] = fit_flop_rate(low, hbm, blend) / peak[precision]
    there, back = fit_half_rate_length(of["attention_forward"]), fit_half_rate_length(of["attention_backward"])
    return {
        "gemm": {name: round(share, 3) for name, share in shares.items()},
        "grouped": round(fit_flop_rate(of["grouped"], hbm, blend) / rate, 3),
        "blend": round(blend, 2),
        "start": start,
        "attention_forward": round(fit_attention_rate(of["attention_forward"], there) / peak["bf16"], 3),
        "attention_backward": round(fit_attention_rate(of["attention_backward"], back) / peak["bf16"], 3),
        "forward_half": round(there),
        "backward_half": round(back),
        "stream": round(median(t.bytes / t.seconds for t in of["stream"]) / hbm, 3),
    }
