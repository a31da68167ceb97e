"""Payloads hold what the rules of FP8 say, and a row that has travelled is quantised to the same bytes."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.quantise.fp8 import E4M3, E5M2, Quantised, ScaleRule
from moefold.kernels.quantise.fp8_payload import (
    dequantised_channels,
    dequantised_rows,
    pack_channels,
    pack_rows,
    quantise_channels,
    quantise_row_blocks,
    row_payload_bytes,
    unpack_channels,
    unpack_rows,
)


def numbers(rows: int, width: int, spread: float = 2.0) -> torch.Tensor:
    """Of very different magnitudes from row to row and from channel to channel; some rows are zero."""
    generator = torch.Generator().manual_seed(rows * width)
    x = torch.randn(rows, width, generator=generator)
    x = x * torch.exp(spread * torch.randn(rows, 1, generator=generator))
    x = x * torch.exp(spread * torch.randn(1, width, generator=generator))
    x[::7] = 0
    return x


def quantised_by_hand(values: list[float], format: str) -> tuple[list[float], float]:
    """One block: the nearest of all numbers of the format, ties to the even byte, times the scale."""
    largest = 448.0 if format == "e4m3" else 57344.0
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    table = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    finite = table.isfinite()
    amax = max(abs(v) for v in values)
    scale = (torch.tensor(amax) / torch.tensor(largest)).item() if amax else 1.0
    scaled = (torch.tensor(values) * (1 / torch.tensor(scale))).double().clamp(-largest, largest)
    distance = torch.where(finite, (table - scaled[:, None]).abs(), torch.inf)
    nearest = distance == distance.amin(1, keepdim=True)
    even = torch.arange(256) % 2 == 0
    byte = (nearest.int() + (nearest & even).int()).argmax(1)
    return table[byte].tolist(), scale


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_rows_are_quantised_in_blocks_by_the_rules(format):
    x = numbers(9, 140)
    rows = quantise_row_blocks(x, ScaleRule(format))
    assert rows.values.shape == (9, 140)
    assert rows.scales.shape == (9, 2), "the last block has 12 values"
    for row in (0, 1, 8):
        for block, (begin, end) in enumerate(((0, 128), (128, 140))):
            right, scale = quantised_by_hand(x[row, begin:end].tolist(), format.name)
            assert rows.scales[row, block].item() == scale
            assert rows.values[row, begin:end].float().abs().tolist() == [abs(v) for v in right]


def test_channels_are_quantised_in_groups_of_128_rows():
    x = numbers(200, 6)
    channels = quantise_channels(x, ScaleRule())
    assert channels.values.shape == (200, 6)
    assert channels.scales.shape == (2, 6)
    for channel in (0, 5):
        for group, (begin, end) in enumerate(((0, 128), (128, 200))):
            right, scale = quantised_by_hand(x[begin:end, channel].tolist(), "e4m3")
            assert channels.scales[group, channel].item() == scale
            assert channels.values[begin:end, channel].float().abs().tolist() == [abs(v) for v in right]


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("width", [1, 128, 140])
def test_a_payload_is_unpacked_to_the_bytes_that_were_packed(rows: int, width: int):
    x = numbers(rows, width)
    for block in (128, width):
        packed = quantise_row_blocks(x, ScaleRule(E5M2), block)
        payload = pack_rows(packed)
        assert payload.dtype == torch.uint8
        assert payload.shape == (rows, row_payload_bytes(width, block))
        assert_equal_bytes(unpack_rows(payload, width, E5M2), packed)
    by_channel = quantise_channels(x, ScaleRule())
    assert_equal_bytes(unpack_channels(pack_channels(by_channel), width, rows), by_channel)


def assert_equal_bytes(mine: Quantised, right: Quantised):
    assert torch.equal(mine.values.view(torch.uint8), right.values.view(torch.uint8))
    assert torch.equal(mine.scales, right.scales)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_has_travelled_is_quantised_to_the_same_bytes(dtype: torch.dtype, power_of_two: bool):
    rule = ScaleRule(E4M3, power_of_two)
    x = numbers(4000, 256).to(dtype)
    first = quantise_row_blocks(x, rule)
    arrived = dequantised_rows(first, dtype)
    again = quantise_row_blocks(arrived, rule)
    if power_of_two:  # another power of two may fit the rounded values: they are the same all the same
        assert torch.equal(dequantised_rows(again, dtype), arrived)
    else:
        assert torch.equal(again.values.view(torch.uint8), first.values.view(torch.uint8))
        torch.testing.assert_close(again.scales, first.scales, rtol=2**-8, atol=0)


def test_errors_of_random_values_are_those_of_the_formats():
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))

    def error(back: torch.Tensor) -> float:
        return ((back - x).norm() / x.norm()).item()

    assert 0.02 < error(dequantised_rows(quantise_row_blocks(x, ScaleRule()), x.dtype)) < 0.028
    assert 0.04 < error(dequantised_rows(quantise_row_blocks(x, ScaleRule(E5M2)), x.dtype)) < 0.056
    assert 0.02 < error(dequantised_channels(quantise_channels(x, ScaleRule()), x.dtype)) < 0.028


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_column_copy_of_rows_that_have_travelled_has_the_stated_error(dtype: torch.dtype):
    """Two roundings, along rows and along columns, are off by sqrt(2) of one."""
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    arrived = dequantised_rows(quantise_row_blocks(x, ScaleRule()), dtype)

    def error_of_columns(rows: torch.Tensor) -> float:
        copy = dequantised_channels(quantise_channels(rows, ScaleRule()), torch.float32)
        return ((copy - x.float()).norm() / x.float().norm()).item()

    assert error_of_columns(x) == pytest.approx(0.026, abs=0.001)
    assert error_of_columns(arrived) == pytest.approx(0.036, abs=0.001)


def test_what_is_not_finite_stays_so():
    x = torch.ones(2, 256)
    x[0, 3] = torch.inf
    back = dequantised_rows(quantise_row_blocks(x, ScaleRule()), torch.float32)
    assert back[0, :128].isnan().all()
    assert (back[0, 128:] == 1).all()
    assert (back[1] == 1).all()
