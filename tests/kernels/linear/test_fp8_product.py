"""Products of FP8 operands: the stated sums number by number, close to the exact product of what the bytes mean, and
blind to padding, empty experts and undefined rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from moefold.kernels.linear.fp8_product import fp8_product, fp8_weight_product
from moefold.kernels.quantise.fp8 import E4M3, E5M2, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import quantise_tiles
from moefold.kernels.quantise.quantise_weight import quantise_weight
from moefold.kernels.quantise.row_tiles import RowTiles, pad_to_tiles, row_tiles

COUNTS = {"one expert": [200], "some empty": [0, 130, 0, 3, 67, 0], "no rows": [0, 0], "whole tiles": [128, 256]}
WIDTHS = [(128, 128), (144, 304), (16, 32)]  # outputs, inputs


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """With outliers, so that scales differ much."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * (1 + 30 * (torch.rand(*shape, generator=generator) < 0.01))


def tiles_of(counts: list[int]) -> tuple[RowTiles, int]:
    rows = sum(counts)
    return row_tiles(torch.tensor(counts).cumsum(0), rows), rows


def dequantised_rows(x: Quantised) -> torch.Tensor:
    """fp64 (P, K) of scales that cover 128 columns, or all."""
    width = x.values.shape[1]
    scales = x.scales.double().repeat_interleave(-(-width // x.scales.shape[1]) if x.scales.shape[1] == 1 else 128, 1)
    return x.values.double() * scales[:, :width]


def dequantised_columns(x: Quantised) -> torch.Tensor:
    """fp64 (D, P)."""
    tiles_MDB = x.values.double() * x.scales.double()
    return tiles_MDB.transpose(0, 1).flatten(1)


def dequantised_weight(w: Quantised) -> torch.Tensor:
    _, n, d = w.values.shape
    scales = w.scales.double()
    if scales.shape[1] != n:
        scales = scales.repeat_interleave(n if scales.shape[1] == 1 else 128, 1)[:, :n]
    if scales.shape[2] != 1:
        scales = scales.repeat_interleave(128, 2)[:, :, :d]
    return w.values.double() * scales


def operands(kind: str, x: torch.Tensor, w: torch.Tensor, tiles: RowTiles) -> tuple[Any, Any, str]:
    """What a recipe of blocks and one of rows and channels would multiply."""
    rule = ScaleRule(E4M3)
    if kind == "block":
        return quantise_tiles(x, tiles, rule, rows="block").rows, quantise_weight(w, "block", rule).forward, "block"
    amax = pad_to_tiles(x, tiles).abs().amax(1).clamp(min=1e-6)
    scales = "channel" if kind == "row" else "expert"
    rows = quantise_tiles(x, tiles, rule, rows=amax / 448).rows
    return rows, quantise_weight(w, scales, rule).forward, "promoted"


def own_rows(counts: list[int]) -> list[tuple[int, slice, slice]]:
    """(expert, its rows, its padded rows)."""
    found, first, tile = [], 0, 0
    for e, count in enumerate(counts):
        found.append((e, slice(first, first + count), slice(128 * tile, 128 * tile + count)))
        first, tile = first + count, tile + -(-count // 128)
    return found


@pytest.mark.parametrize("kind", ["block", "row", "tensor"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_product_is_close_to_the_exact_product_of_its_operands(counts: str, widths: tuple[int, int], kind: str):
    """fp32 sums of K / 128 blocks: an error of a few units in the last place of the sum of magnitudes."""
    (n, d), of_expert = widths, COUNTS[counts]
    tiles, rows = tiles_of(of_expert)
    x, w = numbers(max(rows, 1), d, seed=1), numbers(len(of_expert), n, d, seed=2)
    a, b, sums = operands(kind, x, w, tiles)
    y = fp8_product(a, b, tiles, rows, sums, torch.float32)
    assert y.shape == (rows, n)
    exact_a, exact_b = dequantised_rows(a), dequantised_weight(b)
    for e, mine, padded in own_rows(of_expert):
        exact = exact_a[padded] @ exact_b[e].T
        magnitude = exact_a[padded].abs() @ exact_b[e].abs().T
        assert ((y[mine].double() - exact).abs() <= 4 * 2**-24 * magnitude).all()


def fp32_chain(partials: list[float], scale_a: list[np.float32], scale_b: list[np.float32]) -> np.float32:
    """y = fma(partial * scale_a, scale_b, y), each partial rounded once."""
    y = np.float32(0)
    for partial, a, b in zip(partials, scale_a, scale_b, strict=True):
        scaled = np.float32(partial) * a
        y = np.float32(float(scaled) * float(b) + float(y))
    return y


def test_the_numbers_of_block_sums_are_those_stated():
    counts, n, d = [3, 0, 2], 20, 300
    tiles, rows = tiles_of(counts)
    x, w = numbers(rows, d, seed=3), numbers(3, n, d, seed=4)
    a, b, _ = operands("block", x, w, tiles)
    y = fp8_product(a, b, tiles, rows, "block", torch.float32)
    a_values, b_values = a.values.double().tolist(), b.values.double().tolist()
    a_scales, b_scales = a.scales.numpy(), b.scales.numpy()
    for e, mine, padded in own_rows(counts):
        for r, p in zip(range(mine.start, mine.stop), range(padded.start, padded.stop), strict=True):
            for j in range(n):
                terms = [p_ * q for p_, q in zip(a_values[p], b_values[e][j], strict=True)]
                partials = [math.fsum(terms[k : k + 128]) for k in range(0, d, 128)]
                expected = fp32_chain(partials, list(a_scales[p]), list(b_scales[e, j // 128]))
                assert y[r, j].item() == float(expected)


def test_the_numbers_of_promoted_sums_are_those_stated():
    counts, n, d = [2], 16, 272
    tiles, rows = tiles_of(counts)
    a, b, _ = operands("row", numbers(rows, d, seed=3), numbers(1, n, d, seed=4), tiles)
    y = fp8_product(a, b, tiles, rows, "promoted", torch.float32)
    for r in range(rows):
        for j in range(n):
            terms = (a.values[r].double() * b.values[0, j].double()).tolist()
            total = np.float32(0)
            for k in range(0, d, 128):
                total = total + np.float32(math.fsum(terms[k : k + 128]))
            expected = (total * a.scales[r, 0].numpy()) * b.scales[0, j, 0].numpy()
            assert y[r, j].item() == float(expected)


@pytest.mark.parametrize("gradients", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_weight_gradient_is_close_to_the_exact_product_of_its_operands(counts: str, widths: Any, gradients: Any):
    (n, d), of_expert = widths, COUNTS[counts]
    tiles, rows = tiles_of(of_expert)
    dy, x = numbers(max(rows, 1), n, seed=5), numbers(max(rows, 1), d, seed=6)
    a = quantise_tiles(dy, tiles, ScaleRule(gradients), columns="block").columns
    b = quantise_tiles(x, tiles, ScaleRule(E4M3), columns="block").columns
    out = torch.full((len(of_expert), n, d), torch.nan)
    assert a is not None
    assert b is not None
    fp8_weight_product(a, b, tiles, "block", out)
    exact_a, exact_b = dequantised_columns(a), dequantised_columns(b)
    for e, _, padded in own_rows(of_expert):
        exact = exact_a[:, padded] @ exact_b[:, padded].T
        magnitude = exact_a[:, padded].abs() @ exact_b[:, padded].abs().T
        assert ((out[e].double() - exact).abs() <= 4 * 2**-24 * magnitude).all()


def test_a_weight_gradient_with_a_scale_for_each_channel_scales_the_finished_sum():
    counts, n, d = [140, 0, 30], 32, 48
    tiles, rows = tiles_of(counts)
    dy, x = numbers(rows, n, seed=5), numbers(rows, d, seed=6)
    used = [2, 1, 0]  # tiles of each expert
    scale_n, scale_d = torch.rand(3, n) + 0.5, torch.rand(3, d) + 0.5
    experts = tiles.tiles_M4[:, 0].long()
    a = quantise_tiles(dy, tiles, ScaleRule(), columns=scale_n[experts]).columns
    b = quantise_tiles(x, tiles, ScaleRule(), columns=scale_d[experts]).columns
    out = torch.empty(3, n, d)
    assert a is not None
    assert b is not None
    assert sum(used) == int(tiles.count)
    fp8_weight_product(a, b, tiles, "promoted", out)
    for e, _, padded in own_rows(counts):
        total = torch.zeros(n, d)
        for first in range(padded.start, padded.stop, 128):
            tile = first // 128
            total += (a.values[tile].double() @ b.values[tile].double().T).float()
        assert torch.equal(out[e], (total * scale_n[e][:, None]) * scale_d[e])


def test_rows_behind_the_last_end_change_nothing_and_are_zero():
    counts, n, d = [100, 40], 32, 48
    tiles = row_tiles(torch.tensor(counts).cumsum(0), 400)
    x = numbers(400, d, seed=1)
    x[140:] = torch.nan
    a, b, sums = operands("block", x, numbers(2, n, d, seed=2), tiles)
    y = fp8_product(a, b, tiles, 400, sums, torch.float32)
    assert y[:140].isfinite().all()
    assert not y[140:].any()
    exact_tiles, _ = tiles_of(counts)
    a, b, sums = operands("block", x[:140], numbers(2, n, d, seed=2), exact_tiles)
    assert torch.equal(fp8_product(a, b, exact_tiles, 140, sums, torch.float32), y[:140])


def test_a_row_that_is_not_finite_spoils_its_own_results_only():
    counts, n, d = [5], 16, 160
    tiles, rows = tiles_of(counts)
    x = numbers(rows, d, seed=1)
    x[2, 150] = torch.inf
    a, b, sums = operands("block", x, numbers(1, n, d, seed=2), tiles)
    y = fp8_product(a, b, tiles, rows, sums, torch.float32)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()
