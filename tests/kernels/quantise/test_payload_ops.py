"""FP8 payloads in Triton, by its interpreter where there is no GPU: the bytes and the bits of the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

from moefold.kernels.quantise.fp8 import E4M3, E5M2, ScaleRule
from moefold.kernels.quantise.payload_ops import (
    channels_to_payload,
    payloads_to_channels,
    rows_to_payload,
    sum_payload_rows,
)
from moefold.kernels.registry import KernelOp
from tests.support.fp8_interpreter import convert_by_torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []  # without one, kernels run in Triton's interpreter


@pytest.fixture(autouse=True)
def rounding_of_gpus(monkeypatch: pytest.MonkeyPatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)


def assert_same_bits(op: KernelOp[..., Any], *inputs: Any):
    results = []
    for run in (op.implementations["triton"], op.reference):
        first, *others = inputs
        written = first.clone()
        returned = run(written, *others)
        results.append(written if op.mutates else returned)
    mine, right = results
    assert (mine.shape, mine.dtype) == (right.shape, right.dtype)
    assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8)), op.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op", [rows_to_payload, sum_payload_rows, channels_to_payload, payloads_to_channels], ids=lambda op: op.name
)
def test_every_case_has_the_bytes_of_the_reference(op: KernelOp[..., Any], dtype: torch.dtype):
    for case in op.cases(DEVICE, dtype):
        assert_same_bits(op, *case.inputs)


def test_odd_values_have_the_bytes_of_the_reference():
    powers = 2.0 ** torch.arange(-149, 128).double()
    ties = torch.tensor([17.0, 19.0, 448.0, 464.0, 57344.0, 61440.0, 2.0**-10, 0.0, -0.0])
    x = torch.cat((ties.repeat(7), powers.float(), -1.3 * powers.float())).to(DEVICE)
    x = torch.stack((x, x.roll(60), torch.zeros_like(x), torch.ones_like(x)))
    x[3, 5] = torch.inf
    x[3, 300] = torch.nan
    for rule in (ScaleRule(), ScaleRule(E5M2), ScaleRule(E4M3, True)):
        for block in (128, x.shape[1]):
            assert_same_bits(rows_to_payload, x, rule, block)
        assert_same_bits(rows_to_payload, x.T, rule)
        assert_same_bits(channels_to_payload, x.T, rule)


def test_sums_of_fp64_are_added_in_fp64():
    parts = torch.randn(4, 1, 500, device=DEVICE)
    payloads = torch.stack([rows_to_payload(part, ScaleRule()) for part in parts])
    total = torch.empty(1, 500, dtype=torch.float64, device=DEVICE)
    assert_same_bits(sum_payload_rows, total, payloads, E4M3)
