"""Fit of kernel efficiencies to timed kernels of one GPU. Torch-free: `moefold bench calibrate` measures the points.

Every curve has one or two parameters, so a ternary search is enough. It minimises the squares of the log of time, in
which 10 % too fast and 10 % too slow have the same weight.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from moefold.plan.machine.gpu import roofline_seconds

EXPERT_TILE_ROWS = 128  # rows of a grouped GEMM's tile: on average half a tile of each expert is padding
HALF_RATE_HEAD_WIDTH = 64  # width of a head at which attention's exponentials take as long as its GEMMs
SEARCH_STEPS = 60
BLEND_STEPS = 61  # 1 to 4 in steps of 1/20


@dataclass(frozen=True)
class TimedKernel:
    """A timed kernel. `rows` is for grouped GEMMs, `length` and `width` (of a head) for attention."""

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
        """FLOPs, padding of tiles included."""
        if self.what != "grouped":
            return self.flops
        padding = EXPERT_TILE_ROWS / 2 / self.rows
        return self.flops * (1 + padding)


TimedKernels = Sequence[TimedKernel]
TimePrediction = Callable[[TimedKernel], float]
Efficiencies = dict[str, object]
Curve = Callable[[float], float]


def mean_squared_log_error(points: TimedKernels, predict: TimePrediction) -> float:
    """Mean square of the log of predicted over measured time."""
    ratios = [predict(point) / point.seconds for point in points]
    return mean(math.log(ratio) ** 2 for ratio in ratios)


def minimize_unimodal(f: Curve, low: float, high: float) -> float:
    """The argument of the minimum of a unimodal function, by ternary search."""
    for _ in range(SEARCH_STEPS):
        third = (high - low) / 3
        left = low + third
        right = high - third
        if f(left) < f(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def gemm_error(points: TimedKernels, rate: float, hbm: float, blend: float) -> float:
    def predicted_seconds(kernel: TimedKernel) -> float:
        computing = kernel.padded_flops / rate
        moving = kernel.bytes / hbm
        return roofline_seconds(computing, moving, blend)

    return mean_squared_log_error(points, predicted_seconds)


def fit_flop_rate(points: TimedKernels, hbm: float, blend: float) -> float:
    """Asymptotic FLOP/s of large GEMMs."""
    best = max(point.padded_flops / point.seconds for point in points)

    def error_at_log_rate(log_rate: float) -> float:
        rate = math.exp(log_rate)
        return gemm_error(points, rate, hbm, blend)

    lowest = math.log(best / 20)
    highest = math.log(best * 20)
    log_rate = minimize_unimodal(error_at_log_rate, lowest, highest)
    return math.exp(log_rate)


def fit_roofline_blend(sets: Sequence[TimedKernels], hbm: float) -> float:
    """Exponent that blends the two limits of the roofline: one for all sets of GEMMs, each with its own rate."""

    def fitting_error(blend: float) -> float:
        error = 0.0
        for points in sets:
            rate = fit_flop_rate(points, hbm, blend)
            mean_error = gemm_error(points, rate, hbm, blend)
            error += len(points) * mean_error
        return error

    candidates = [1 + step / 20 for step in range(BLEND_STEPS)]
    return min(candidates, key=fitting_error)


def fit_attention_rate(points: TimedKernels, half: float) -> float:
    """Asymptotic FLOP/s of attention, half of which is reached at `half` tokens."""
    log_rates: list[float] = []
    for point in points:
        efficiency = attention_efficiency(point.length, point.width, half)
        rate = point.flops / point.seconds / efficiency
        log_rates.append(math.log(rate))
    return math.exp(mean(log_rates))


def fit_half_rate_length(points: TimedKernels) -> float:
    """Sequence length at which attention reaches half of its rate."""

    def fitting_error(half: float) -> float:
        rate = fit_attention_rate(points, half)

        def predicted_seconds(kernel: TimedKernel) -> float:
            efficiency = attention_efficiency(kernel.length, kernel.width, half)
            return kernel.flops / rate / efficiency

        return mean_squared_log_error(points, predicted_seconds)

    return minimize_unimodal(fitting_error, 1.0, 20_000.0)


def attention_efficiency(length: float, width: float, half: float) -> float:
    """Share of its asymptotic rate that attention reaches at this length and head width."""
    by_length = length / (length + half)
    return by_length * width / (width + HALF_RATE_HEAD_WIDTH)


def fit_efficiencies(points: TimedKernels, peak: Mapping[str, float], hbm: float, start: float) -> Efficiencies:
    """The `kernels` section of a GPU's file. `peak` is by precision."""
    by_kind = defaultdict[str, list[TimedKernel]](list)
    for point in points:
        by_kind[point.what].append(point)
    by_precision = defaultdict[str, list[TimedKernel]](list)
    for point in by_kind["gemm"]:
        by_precision[point.precision].append(point)

    # GEMMs: one blend for all, a rate for each precision.
    plain = by_precision.pop("bf16")
    plain_peak = peak["bf16"]
    grouped = by_kind["grouped"]
    blend = fit_roofline_blend([plain, grouped], hbm)
    rate = fit_flop_rate(plain, hbm, blend)
    grouped_rate = fit_flop_rate(grouped, hbm, blend)
    gemm = {"bf16": round(rate / plain_peak, 3)}
    for precision in sorted(by_precision):
        low_rate = fit_flop_rate(by_precision[precision], hbm, blend)
        share = low_rate / peak[precision]
        gemm[precision] = round(share, 3)

    # Attention: forward and backward are fitted separately.
    forward = by_kind["attention_forward"]
    backward = by_kind["attention_backward"]
    forward_half = fit_half_rate_length(forward)
    backward_half = fit_half_rate_length(backward)
    forward_rate = fit_attention_rate(forward, forward_half)
    backward_rate = fit_attention_rate(backward, backward_half)
    streams = by_kind["stream"]
    bandwidths = [point.bytes / point.seconds for point in streams]
    bandwidth = median(bandwidths)
    return {
        "gemm": gemm,
        "grouped": round(grouped_rate / rate, 3),
        "blend": round(blend, 2),
        "start": start,
        "attention_forward": round(forward_rate / plain_peak, 3),
        "attention_backward": round(backward_rate / plain_peak, 3),
        "forward_half": round(forward_half),
        "backward_half": round(backward_half),
        "stream": round(bandwidth / hbm, 3),
    }
