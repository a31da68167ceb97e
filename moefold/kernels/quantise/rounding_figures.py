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

from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import CASE_WIDTHS, quantise_tiles
from moefold.kernels.quantise.quantise_weight import QuantisedWeight, quantise_weight
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
        return self.scales_BRK.shape[2] == self.values_BRC.shape[2]


@register_inner_op
def rounding_figures(source_ND: Tensor, index_P: Tensor, copy: CopyMatrices) -> RoundingFigures:
    """Row p of the copy is `source_ND[index_P[p]]`, or zero where the index is -1."""
    source_and_zeros = F.pad(source_ND, (0, 0, 0, 1))  # the index -1 reads the last row
    x_PC = source_and_zeros[index_P.long()].double()
    x_BRC = x_PC.view(copy.values_BRC.shape)
    bytes_BRC = copy.values_BRC.double()
    scales_BRC = scale_of_every_value(copy).double()
    counted = x_BRC != 0
    underflowed = counted & (bytes_BRC == 0)
    error_BRC = torch.where(counted, x_BRC - bytes_BRC * scales_BRC, 0.0)
    nothing = x_BRC.new_full((), -torch.inf)
    sums = (
        counted.sum().double(),
        underflowed.sum().double(),
        error_BRC.square().sum(),
        x_BRC.square().sum(),
    )
    extremes = (
        torch.where(counted, x_BRC.abs(), nothing).amax(),
        torch.where(counted, scales_BRC, nothing).amax(),
        torch.where(counted, -scales_BRC, nothing).amax(),
    )
    return RoundingFigures(torch.stack(sums), torch.stack(extremes))


def scale_of_every_value(copy: CopyMatrices) -> Tensor:
    if copy.has_column_scales:
        return copy.scales_BRK
    spread = copy.scales_BRK.repeat_interleave(BLOCK, 2)
    return spread[:, :, : copy.values_BRC.shape[2]]


@rounding_figures.register_fast("triton")
def rounding_figures_triton(source_ND: Tensor, index_P: Tensor, copy: CopyMatrices) -> RoundingFigures:
    from moefold.kernels.quantise.rounding_figures_triton import launch_rounding_figures

    figures_G7 = launch_rounding_figures(source_ND, index_P, *copy, copy.has_column_scales)
    sums_G4, extremes_G3 = figures_G7.double().split((4, 3), dim=1)
    return RoundingFigures(sums_G4.sum(0), extremes_G3.amax(0))


# ---- copies as matrices


def matrices_of_rows(rows: Quantised) -> CopyMatrices:
    """Tiles of a copy along rows: values (P, D), scales (P, D / 128) or (P, 1)."""
    blocks = -(-rows.values.shape[1] // BLOCK)
    scales_PK = rows.scales.expand(-1, blocks)
    return CopyMatrices(rows.values.unflatten(0, (-1, BLOCK)), scales_PK.unflatten(0, (-1, BLOCK)))


def matrices_of_columns(columns: Quantised) -> CopyMatrices:
    """Tiles of a copy along columns: values (M, D, 128), scales (M, D, 1)."""
    scales_MDB = columns.scales.expand(-1, -1, BLOCK)
    return CopyMatrices(columns.values.mT, scales_MDB.mT)


def matrices_of_weight(copies: QuantisedWeight) -> Iterator[CopyMatrices]:
    """Both layouts of a weight, as (E, N, D)."""
    values_END, scales = copies.forward
    experts, outputs, inputs = values_END.shape
    by_rows = spread_over_outputs(scales, outputs)
    blocks = -(-inputs // BLOCK)
    yield CopyMatrices(values_END, by_rows.expand(experts, outputs, blocks))
    values_EDN, scales = copies.transposed
    of_channels = scales.shape[1:] == (inputs, 1)
    if of_channels:
        yield CopyMatrices(values_EDN.mT, scales.mT.expand(experts, outputs, inputs))
    else:
        by_rows = spread_over_outputs(scales.mT, outputs)
        yield CopyMatrices(values_EDN.mT, by_rows.expand(experts, outputs, blocks))


def spread_over_outputs(scales: Tensor, outputs: int) -> Tensor:
    """Scales of blocks of outputs at every output; others as they are."""
    if scales.shape[1] in (1, outputs):
        return scales
    return scales.repeat_interleave(BLOCK, 1)[:, :outputs]


# ---- cases


@rounding_figures.register_cases
def rounding_figures_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, tiles, index_R in cases_of_tiles(draw.device):
        index_P = padded_index(tiles, index_R)
        for width in CASE_WIDTHS:
            tokens_ND = draw.normal(CASE_SOURCES, width)
            tokens_ND[:, ::3] *= 2.0**-12  # so that some underflow
            copies = quantise_tiles(tokens_ND, tiles, rule, "block", "block", index_R)
            rows = matrices_of_rows(copies.wanted_rows)
            yield KernelCase(f"{name} of width {width}, along rows", (tokens_ND, index_P, rows))
            columns = matrices_of_columns(copies.wanted_columns)
            yield KernelCase(f"{name} of width {width}, along columns", (tokens_ND, index_P, columns))
    w_END = draw.normal(2, 136, 40, scale=0.02)
    index_P = torch.arange(2 * 136, device=draw.device)
    for kind in ("block", "expert", "channel"):
        both = matrices_of_weight(quantise_weight(w_END, kind, rule))
        for number, copy in enumerate(both):
            yield KernelCase(f"weight, {kind}, layout {number}", (w_END.flatten(0, 1), index_P, copy))
