"""Curves are found again from points that lie on them."""

import pytest

from moefold.plan.machine.efficiency_fit import (
    TimedKernel,
    attention_efficiency,
    fit_efficiencies,
    fit_flop_rate,
    fit_half_rate_length,
    fit_roofline_blend,
)
from moefold.plan.machine.gpu import roofline_seconds

HBM, RATE = 4e12, 700e12
SHAPES = [(8192, 8192, 8192), (4096, 24_576, 1536), (4096, 576, 7168), (16_384, 2048, 512), (2048, 4096, 4096)]


def products(rate: float, blend: float, what: str = "gemm", precision: str = "bf16") -> list[TimedKernel]:
    found: list[TimedKernel] = []
    for rows, n, k in SHAPES:
        flops, size = 2.0 * rows * n * k, 2.0 * (rows * k + n * k + rows * n)
        point = TimedKernel(what, 1.0, flops, size, precision, rows=rows)
        seconds = roofline_seconds(point.padded_flops / rate, size / HBM, blend)
        found.append(TimedKernel(what, seconds, flops, size, precision, rows=rows))
    return found


def attention(rate: float, half: float, what: str) -> list[TimedKernel]:
    lengths = [(1024, 128), (4096, 128), (16_384, 128), (4096, 64)]
    return [
        TimedKernel(what, 1e12 / (rate * attention_efficiency(s, w, half)), 1e12, length=s, width=w) for s, w in lengths
    ]


@pytest.mark.parametrize("blend", [1.1, 1.5, 2.5])
def test_rate_and_blend_are_found(blend: float):
    points = products(RATE, blend)
    found = fit_roofline_blend([points], HBM)
    assert found == pytest.approx(blend, abs=0.051)
    assert fit_flop_rate(points, HBM, blend) == pytest.approx(RATE, rel=1e-3)


def test_the_length_of_half_speed_is_found():
    assert fit_half_rate_length(attention(600e12, 800.0, "attention_forward")) == pytest.approx(800, rel=1e-2)


def test_a_whole_section_is_found():
    points = [
        *products(0.7e15, 1.5),
        *products(1.2e15, 1.5, precision="fp8"),
        *products(0.63e15, 1.5, "grouped"),
        *attention(0.8e15, 500, "attention_forward"),
        *attention(0.7e15, 900, "attention_backward"),
        TimedKernel("stream", 1.0, bytes=3.2e12),
    ]
    found = fit_efficiencies(points, {"bf16": 1e15, "fp8": 2e15}, HBM, 2e-6)
    assert found["gemm"] == {"bf16": pytest.approx(0.7, rel=0.01), "fp8": pytest.approx(0.6, rel=0.01)}
    assert found["grouped"] == pytest.approx(0.9, rel=0.01)
    assert found["stream"] == pytest.approx(0.8)
    assert found["forward_half"] == pytest.approx(500, rel=0.02)
    assert found["backward_half"] == pytest.approx(900, rel=0.02)
