"""Figures of a quantised copy: what rounding to FP8 did to the values. Statistics of a run read them, products do not.

Values and scales of a copy are seen as B matrices of R rows and C columns: tiles, or the weights of experts. A scale
belongs to a row and 128 of its columns, (B, R, C / 128), or to a row and one column, (B, R, C). Values that are zero
count nowhere: padding is zero, and a block of zeros has a scale that means nothing.

N source rows, P = B R rows of the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule, blocks_for, in_blocks, scale_of_values
from moefold.kernels.quantise.quantise_tiles import CASE_WIDTHS, quantise_tiles
from moefold.kernels.quantise.quantise_weight import WEIGHT_SCALES, QuantisedWeight, quantise_weight
from moefold.kernels.quantise.row_tiles import CASE_SOURCES, cases_of_tiles, padded_index
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


class RoundingFigures(NamedTuple):
    """`sums_4`: values other than zero; those of them that became zero; sum of squared errors; sum of squared values.
    `extremes_3`: largest magnitude, largest scale, smallest scale negated; minus infinity without a value. All fp64.
    Sums of several copies add up; of extremes the largest counts."""

    sums_4: Tensor
    extremes_3: Tensor


class CopyMatrices(NamedTuple):
    """Values (B, R, C) and scales (B, R, C / 128 or C) of one copy, as views."""

    values_BRC: Tensor
    scales_BRK: Tensor

    @property
    def has_column_scales(self) -> bool:
        scales = self.scales_BRK.shape[2]
        columns = self.values_BRC.shape[2]
        return scales == columns


@register_inner_op
def rounding_figures(source_ND: Tensor, index_P: Tensor, copy: CopyMatrices) -> RoundingFigures:
    """Row p of the copy is `source_ND[index_P[p]]`, or zero where the index is -1."""
    # values of the source, bytes and scales
    one_row = (0, 0, 0, 1)
    source_and_zeros = F.pad(source_ND, one_row)  # the index -1 reads the last row
    x_PC = source_and_zeros[index_P.long()].double()
    x_BRC = x_PC.view(copy.values_BRC.shape)
    bytes_BRC = copy.values_BRC.double()
    scales_BRC = scale_of_every_value(copy).double()
    # sums
    counted = x_BRC != 0
    underflowed = counted & (bytes_BRC == 0)
    rounded_BRC = bytes_BRC * scales_BRC
    difference_BRC = x_BRC - rounded_BRC
    error_BRC = torch.where(counted, difference_BRC, 0.0)
    sums = (
        counted.sum().double(),
        underflowed.sum().double(),
        error_BRC.square().sum(),
        x_BRC.square().sum(),
    )
    # extremes
    extremes = (
        largest_counted(x_BRC.abs(), counted),
        largest_counted(scales_BRC, counted),
        largest_counted(-scales_BRC, counted),
    )
    sums_4 = torch.stack(sums)
    extremes_3 = torch.stack(extremes)
    return RoundingFigures(sums_4, extremes_3)


def largest_counted(x_BRC: Tensor, counted: Tensor) -> Tensor:
    """Minus infinity, if nothing counts."""
    nothing = x_BRC.new_full((), -torch.inf)
    values = torch.where(counted, x_BRC, nothing)
    return values.amax()


def scale_of_every_value(copy: CopyMatrices) -> Tensor:
    values_BRC, scales_BRK = copy
    if copy.has_column_scales:
        return scales_BRK
    return scale_of_values(scales_BRK, values_BRC)


@rounding_figures.register_fast("triton")
def rounding_figures_triton(source_ND: Tensor, index_P: Tensor, copy: CopyMatrices) -> RoundingFigures:
    from moefold.kernels.quantise.rounding_figures_triton import launch_rounding_figures

    figures_G7 = launch_rounding_figures(source_ND, index_P, *copy, copy.has_column_scales)
    figures_G7 = figures_G7.double()
    sums_G4 = figures_G7[:, :4]
    extremes_G3 = figures_G7[:, 4:]
    return RoundingFigures(sums_G4.sum(0), extremes_G3.amax(0))


# ---- copies as matrices


def matrices_of_rows(rows: Quantised) -> CopyMatrices:
    """Tiles of a copy along rows: values (P, D), scales (P, D / 128) or (P, 1)."""
    width = rows.values.shape[1]
    blocks = blocks_for(width)
    scales_PK = rows.scales.expand(-1, blocks)
    values_MBD = in_blocks(rows.values, 0)
    scales_MBK = in_blocks(scales_PK, 0)
    return CopyMatrices(values_MBD, scales_MBK)


def matrices_of_columns(columns: Quantised) -> CopyMatrices:
    """Tiles of a copy along columns: values (M, D, 128), scales (M, D, 1)."""
    values_MBD = columns.values.mT
    scales_MDB = columns.scales.expand(-1, -1, BLOCK)
    return CopyMatrices(values_MBD, scales_MDB.mT)


def matrices_of_weight(copies: QuantisedWeight) -> Iterator[CopyMatrices]:
    """Both layouts of a weight, as (E, N, D)."""
    values_END, scales = copies.forward
    experts, outputs, inputs = values_END.shape
    blocks = blocks_for(inputs)
    # (E, N, D)
    of_outputs = spread_over_outputs(scales, outputs)
    scales_ENJ = of_outputs.expand(experts, outputs, blocks)
    yield CopyMatrices(values_END, scales_ENJ)
    # (E, D, N)
    values_EDN, scales = copies.transposed
    transposed = scales.mT
    _, lines, blocks_of_line = scales.shape
    of_channels = (lines, blocks_of_line) == (inputs, 1)
    if of_channels:
        scales_ENK = transposed.expand(experts, outputs, inputs)
    else:
        of_outputs = spread_over_outputs(transposed, outputs)
        scales_ENK = of_outputs.expand(experts, outputs, blocks)
    yield CopyMatrices(values_EDN.mT, scales_ENK)


def spread_over_outputs(scales: Tensor, outputs: int) -> Tensor:
    """Scales of blocks of outputs at every output; others as they are."""
    lines = scales.shape[1]
    if lines in (1, outputs):
        return scales
    spread = scales.repeat_interleave(BLOCK, 1)
    return spread[:, :outputs]


# ---- cases


@rounding_figures.register_cases
def rounding_figures_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, tiles, index_R in cases_of_tiles(draw.device):
        index_P = padded_index(tiles, index_R)
        for width in CASE_WIDTHS:
            tokens_ND = draw.normal(CASE_SOURCES, width)
            tokens_ND[:, ::3] *= 2.0**-12  # so that some underflow
            both = ("block", "block")
            copies = quantise_tiles(tokens_ND, tiles, rule, *both, index_R)
            about = f"{name} of width {width}"
            rows = matrices_of_rows(copies.wanted_rows)
            inputs = (tokens_ND, index_P, rows)
            yield KernelCase(f"{about}, along rows", inputs)
            columns = matrices_of_columns(copies.wanted_columns)
            inputs = (tokens_ND, index_P, columns)
            yield KernelCase(f"{about}, along columns", inputs)
    w_END = draw.normal(2, 136, 40, scale=0.02)
    w_PD = w_END.flatten(0, 1)
    rows = len(w_PD)
    index_P = torch.arange(rows, device=draw.device)
    for kind in WEIGHT_SCALES:
        copies = quantise_weight(w_END, kind, rule)
        layouts = matrices_of_weight(copies)
        for number, copy in enumerate(layouts):
            inputs = (w_PD, index_P, copy)
            yield KernelCase(f"weight, {kind}, layout {number}", inputs)
