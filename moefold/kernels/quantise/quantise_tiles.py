"""Quantisation of rows in tiles: along the rows for y = x W^T, along the columns for weight gradients, or both at once.

    rows      values (P, D); scales (P, D / 128), or (P, 1) where they are given
    columns   values (M, D, 128): each tile transposed, so that its 128 rows are contiguous; scales (M, D, 1)

A scale covers a block of 128 values along the contraction (`"block"`), or it is given: one for each row, or one for
each tile and column. Scales of `rows` lie in memory as the products read them, with the rows contiguous.

P padded rows in M tiles (row_tiles.py), D width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from moefold.kernels.quantise.fp8 import (
    E5M2,
    Quantised,
    ScaleRule,
    from_blocks,
    in_blocks,
    in_whole_blocks,
    largest_magnitude,
    quantise_along,
    round_to_fp8,
    scale_from_amax,
)
from moefold.kernels.quantise.row_tiles import CASE_SOURCES, RowTiles, TileSample, cases_of_tiles, pad_to_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

Scales = Tensor | Literal["block"] | None  # given; of blocks of 128; or that direction is not wanted


class TileMaxima(NamedTuple):
    """Largest magnitudes: of each row, (P,), where they are wanted, and of each column within each tile, (M, D)."""

    rows_P: Tensor | None
    columns_MD: Tensor


class QuantisedTiles(NamedTuple):
    """Copies along rows and along columns; None: not wanted."""

    rows: Quantised | None
    columns: Quantised | None

    @property
    def wanted_rows(self) -> Quantised:
        assert self.rows is not None, "no copy along rows was asked for"
        return self.rows

    @property
    def wanted_columns(self) -> Quantised:
        assert self.columns is not None, "no copy along columns was asked for"
        return self.columns

    def of_sample(self, sample: TileSample) -> QuantisedTiles:
        """The copies of some tiles."""
        rows = None if self.rows is None else Quantised(*map(sample.of_rows, self.rows))
        columns = None if self.columns is None else Quantised(*map(sample.of, self.columns))
        return QuantisedTiles(rows, columns)


@register_inner_op
def tile_maxima(source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None = None, rows: bool = True) -> TileMaxima:
    x_PD = pad_to_tiles(source_ND, tiles, index_R)
    x_MBD = in_blocks(x_PD, 0)
    rows_P = largest_magnitude(x_PD, 1) if rows else None
    columns_MD = largest_magnitude(x_MBD, 1)
    return TileMaxima(rows_P, columns_MD)


@tile_maxima.register_fast("triton")
def tile_maxima_triton(
    source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None = None, rows: bool = True
) -> TileMaxima:
    from moefold.kernels.quantise.quantise_tiles_triton import TRITON_KERNELS, launch_tile_maxima

    return TileMaxima(*launch_tile_maxima(TRITON_KERNELS, source_ND, tiles, index_R, rows))


@tile_maxima.register_fast("gluon")
def tile_maxima_gluon(
    source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None = None, rows: bool = True
) -> TileMaxima:
    from moefold.kernels.quantise.quantise_tiles_launch import GLUON_KERNELS
    from moefold.kernels.quantise.quantise_tiles_triton import launch_tile_maxima

    return TileMaxima(*launch_tile_maxima(GLUON_KERNELS, source_ND, tiles, index_R, rows))


CASE_WIDTHS = (128, 72)


@tile_maxima.register_cases
def tile_maxima_cases(draw: CaseInputs) -> Cases:
    for name, tiles, index_R in cases_of_tiles(draw.device):
        for width in CASE_WIDTHS:
            rows_RD = draw.normal(len(index_R), width)
            tokens_ND = draw.normal(CASE_SOURCES, width)
            about = f"{name} of width {width}"
            yield KernelCase(about, (rows_RD, tiles))
            yield KernelCase(f"{about}, gathered", (tokens_ND, tiles, index_R))
            yield KernelCase(f"{about}, columns alone", (tokens_ND, tiles, index_R, False))


@register_inner_op
def quantise_tiles(
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    rows: Scales = None,
    columns: Scales = None,
    index_R: Tensor | None = None,
) -> QuantisedTiles:
    """`rows` given: (P,) fp32. `columns` given: (M, D) fp32."""
    x_PD = pad_to_tiles(source_ND, tiles, index_R)
    by_row = quantise_rows(x_PD, rows, rule)
    by_column = quantise_columns(x_PD, columns, rule)
    return QuantisedTiles(by_row, by_column)


@quantise_tiles.register_fast("triton")
def quantise_tiles_triton(
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    rows: Scales = None,
    columns: Scales = None,
    index_R: Tensor | None = None,
) -> QuantisedTiles:
    """One read of the source for both directions. Tiles that are not in use are not written: theirs are undefined."""
    from moefold.kernels.quantise.quantise_tiles_triton import TRITON_KERNELS, launch_quantise_tiles

    copies = launch_quantise_tiles(TRITON_KERNELS, source_ND, tiles, rule, rows, columns, index_R)
    return QuantisedTiles(*copies)


@quantise_tiles.register_fast("gluon")
def quantise_tiles_gluon(
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    rows: Scales = None,
    columns: Scales = None,
    index_R: Tensor | None = None,
) -> QuantisedTiles:
    """As in Triton, with a layout of threads that needs no exchange between them for the transposed copy."""
    from moefold.kernels.quantise.quantise_tiles_launch import GLUON_KERNELS
    from moefold.kernels.quantise.quantise_tiles_triton import launch_quantise_tiles

    copies = launch_quantise_tiles(GLUON_KERNELS, source_ND, tiles, rule, rows, columns, index_R)
    return QuantisedTiles(*copies)


@quantise_tiles.register_cases
def quantise_tiles_cases(draw: CaseInputs) -> Cases:
    e4m3 = ScaleRule()
    e5m2 = ScaleRule(E5M2, power_of_two=True)
    rules = {"e4m3": e4m3, "e5m2, powers of two": e5m2}
    for name, tiles, index_R in cases_of_tiles(draw.device):
        for width in CASE_WIDTHS:
            tokens_ND = draw.normal(CASE_SOURCES, width)
            for rule_name, rule in rules.items():
                blocks = (tokens_ND, tiles, rule, "block", "block", index_R)
                yield KernelCase(f"{name} of width {width}, {rule_name}", blocks)
            maxima = tile_maxima(tokens_ND, tiles, index_R)
            assert maxima.rows_P is not None, "those of rows are wanted"
            scales_P = scale_from_amax(maxima.rows_P, e4m3)
            scales_MD = scale_from_amax(maxima.columns_MD, e4m3)
            given = (tokens_ND, tiles, e4m3, scales_P, scales_MD, index_R)
            yield KernelCase(f"{name} of width {width}, scales given", given)
        rows_RD = draw.normal(len(index_R), 72)
        inputs = (rows_RD, tiles, e4m3)
        yield KernelCase(f"{name}, rows alone", (*inputs, "block", None))
        yield KernelCase(f"{name}, columns alone", (*inputs, None, "block"))


def quantise_rows(x_PD: Tensor, scales: Scales, rule: ScaleRule) -> Quantised | None:
    if scales is None:
        return None
    if isinstance(scales, Tensor):
        scales_P1 = scales[:, None]
        values_PD = round_to_fp8(x_PD, scales_P1, rule.format)
        return Quantised(values_PD, scales_P1)
    width = x_PD.shape[1]
    x_PNB = in_whole_blocks(x_PD, 1)
    values_PNB, scales_PN = quantise_along(x_PNB, 2, rule)
    values_PD = from_blocks(values_PNB, 1, width)
    scales_NP = scales_PN.T.contiguous()
    return Quantised(values_PD.contiguous(), scales_NP.T)


def quantise_columns(x_PD: Tensor, scales: Scales, rule: ScaleRule) -> Quantised | None:
    if scales is None:
        return None
    x_MBD = in_blocks(x_PD, 0)
    if isinstance(scales, Tensor):
        scales_MD = scales
        values_MBD = round_to_fp8(x_MBD, scales_MD[:, None], rule.format)
    else:
        values_MBD, scales_MD = quantise_along(x_MBD, 1, rule)
    values_MDB = values_MBD.mT.contiguous()
    scales_MD = scales_MD.contiguous()
    return Quantised(values_MDB, scales_MD[..., None])
