"""MXFP8, NVFP4 and the Hadamard transform in Triton, by its interpreter where there is no GPU: the bits of the
references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

from moefold.kernels.quantise.hadamard_blocks import hadamard_blocks
from moefold.kernels.quantise.line_maxima import line_maxima
from moefold.kernels.quantise.mx_blocks import dequantise_mx, quantise_mx
from moefold.kernels.quantise.nv_blocks import dequantise_nv, quantise_nv, round_nv
from moefold.kernels.quantise.scale_lines import scale_lines
from moefold.kernels.registry import KernelOp
from tests.support.fp8_interpreter import convert_by_torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []  # without one, kernels run in Triton's interpreter
OPS = (line_maxima, hadamard_blocks, quantise_mx, dequantise_mx, quantise_nv, round_nv, dequantise_nv, scale_lines)


@pytest.fixture(autouse=True)
def rounding_of_gpus(monkeypatch: pytest.MonkeyPatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_bits(op: KernelOp[..., Any], *inputs: Any):
    mine, right = op.implementations["triton"](*inputs), op.reference(*inputs)
    both = [(mine, right)] if isinstance(mine, Tensor) else zip(mine, right, strict=True)
    for a, b in both:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(bits(a), bits(b)), op.name


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_case_has_the_bits_of_the_reference(op: KernelOp[..., Any], dtype: torch.dtype):
    for case in op.cases(DEVICE, dtype):
        assert_same_bits(op, *case.inputs)


def odd_values(width: int) -> Tensor:
    """Lines of ties, of every power of two, of zeros, of the largest and the smallest numbers, and behind them lines
    with an infinity."""
    powers = 2.0 ** torch.arange(-149, 128).double()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 448.0, 464.0, 17.0, 19.0, 2.0**-10])
    numbers = torch.cat((ties, -ties, torch.zeros(width), powers.float(), -1.3 * powers.float()))
    lines = numbers[: len(numbers) // width * width].view(-1, width)
    limits = torch.tensor([[torch.finfo(torch.float32).max], [448.0], [2688.0], [1.0]]).expand(-1, width)
    infinite = torch.ones(2, width)
    infinite[:, 3] = torch.tensor([torch.inf, -torch.inf])
    return torch.cat((lines, limits, lines.flip(0), infinite)).to(DEVICE)


def test_odd_values_have_the_bits_of_the_reference():
    x = odd_values(64)
    for rounding in ("up", "down"):
        assert_same_bits(quantise_mx, x, rounding)
    of_lines = x.abs().amax(1, keepdim=True)
    for amax in (of_lines, of_lines.clamp(max=3.4e38).amax().expand_as(of_lines), torch.ones_like(of_lines)):
        assert_same_bits(quantise_nv, x, amax)
    assert_same_bits(line_maxima, x)


def test_a_nan_is_seen_by_its_block_alone():
    x = torch.ones(2, 96, device=DEVICE)
    x[1, 40] = torch.nan
    quantised = quantise_mx.implementations["triton"](x)
    assert (quantised.scales == 255).tolist() == [[False] * 3, [False, True, False]]
    assert quantised.values.float().isnan().sum(1).tolist() == [0, 32]
    coded = quantise_nv.implementations["triton"](x, torch.ones(2, 1, device=DEVICE))
    assert coded.scales.float().isnan().sum(1).tolist() == [0, 1]
    assert line_maxima.implementations["triton"](x).isnan().tolist() == [False, True]
