"""Quantisation of rows in tiles with scales that are known before, such as delayed ones. One read makes the copies and
says what the next scales are made from, and how many values are beyond the range of these.

    quantise_delayed   copies, the largest magnitude of each column within each tile, number of saturated values
    note_maxima        the largest of these of each expert, and of each of its channels

A value saturates if its scaled magnitude is nearer to the number that would follow the format's largest
(`Fp8Format.saturates`); a value that merely rounds down to the largest number does not.

P padded rows in M tiles (row_tiles.py), D width, E experts, C channels: D, or 1 where an expert has one scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import (
    E5M2,
    Copies,
    Fp8Format,
    ScaleRule,
    in_blocks,
    largest_magnitude,
    scale_from_amax,
)
from moefold.kernels.quantise.quantise_tiles import CASE_WIDTHS, QuantisedTiles, quantise_tiles, tile_maxima
from moefold.kernels.quantise.row_tiles import CASE_SOURCES, RowTiles, cases_of_tiles, pad_to_tiles
from moefold.kernels.quantise.wide_scales import (
    maxima_of_experts,
    repeat_for_rows,
    scales_of_tiles,
)
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op


class DelayedScales(NamedTuple):
    """Scales of experts, fp32: along rows (E, 1), along columns (E, C). Where C is 1, both are the same."""

    rows_E1: Tensor
    columns_EC: Tensor


class DelayedTiles(NamedTuple):
    """`maxima_MD`: largest magnitudes of columns within tiles. `saturated_1`: int64, over all copies."""

    copies: QuantisedTiles
    maxima_MD: Tensor
    saturated_1: Tensor


@register_inner_op
def quantise_delayed(
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    scales: DelayedScales,
    rows: bool,
    columns: bool,
    index_R: Tensor | None = None,
) -> DelayedTiles:
    """`rows`, `columns`: which copies are wanted."""
    width = source_ND.shape[1]
    rows_P, columns_MD = spread_scales(scales, tiles, width)
    of_rows = rows_P if rows else None
    of_columns = columns_MD if columns else None
    copies = quantise_tiles.reference(source_ND, tiles, rule, of_rows, of_columns, index_R)
    x_PD = pad_to_tiles(source_ND, tiles, index_R)
    x_MBD = in_blocks(x_PD, 0)
    maxima_MD = largest_magnitude(x_MBD, 1)
    saturated_1 = torch.zeros(1, dtype=torch.int64, device=x_PD.device)
    if rows:
        saturated_1 += count_beyond(x_PD, rows_P[:, None], rule.format)
    if columns:
        saturated_1 += count_beyond(x_MBD, columns_MD[:, None], rule.format)
    return DelayedTiles(copies, maxima_MD, saturated_1)


def spread_scales(scales: DelayedScales, tiles: RowTiles, width: int) -> tuple[Tensor, Tensor]:
    """Scales of experts as `quantise_tiles` takes them, of rows and of columns."""
    rows_M1 = scales_of_tiles(scales.rows_E1, tiles)
    rows_P = repeat_for_rows(rows_M1)
    columns_MC = scales_of_tiles(scales.columns_EC, tiles)
    columns_MD = columns_MC.expand(-1, width)
    return rows_P, columns_MD.contiguous()


def count_beyond(x: Tensor, scale: Tensor, format: Fp8Format) -> Tensor:
    inverse = 1.0 / scale.float()
    scaled = x.float() * inverse
    is_beyond = scaled.abs() > format.saturates
    return is_beyond.sum()


@quantise_delayed.register_fast("triton")
def quantise_delayed_triton(
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    scales: DelayedScales,
    rows: bool,
    columns: bool,
    index_R: Tensor | None = None,
) -> DelayedTiles:
    """Tiles that are not in use are not written: theirs are undefined."""
    from moefold.kernels.quantise.delayed_tiles_triton import TRITON_KERNEL, launch_quantise_delayed

    made = launch_quantise_delayed(TRITON_KERNEL, source_ND, tiles, rule, scales, rows, columns, index_R)
    return named_tiles(*made)


@quantise_delayed.register_fast("gluon")
def quantise_delayed_gluon(
    source_ND: Tensor,
    tiles: RowTiles,
    rule: ScaleRule,
    scales: DelayedScales,
    rows: bool,
    columns: bool,
    index_R: Tensor | None = None,
) -> DelayedTiles:
    """As in Triton, with a layout of threads that needs no exchange between them for the transposed copy."""
    from moefold.kernels.quantise.delayed_tiles_triton import launch_quantise_delayed
    from moefold.kernels.quantise.quantise_tiles_launch import GLUON_DELAYED_KERNEL

    made = launch_quantise_delayed(GLUON_DELAYED_KERNEL, source_ND, tiles, rule, scales, rows, columns, index_R)
    return named_tiles(*made)


def named_tiles(copies: Copies, maxima_MD: Tensor, saturated_1: Tensor) -> DelayedTiles:
    """What a launch gave: copies along rows and along columns, and the rest."""
    return DelayedTiles(QuantisedTiles(*copies), maxima_MD, saturated_1)


@register_in_place_op
def note_maxima(maxima_MD: Tensor, tiles: RowTiles, experts_E: Tensor, channels_ED: Tensor | None = None) -> None:
    """Raise the largest magnitudes of experts, and of their channels where these are kept, to those of their tiles in
    use. NaN wins. Noted twice, maxima change nothing."""
    real_M1 = tiles.tiles_M4[:, 2:3]
    used_MD = torch.where(real_M1 > 0, maxima_MD, 0)
    most_ED = maxima_of_experts(used_MD, tiles)
    most_E = most_ED.amax(1)
    torch.maximum(experts_E, most_E, out=experts_E)
    if channels_ED is not None:
        torch.maximum(channels_ED, most_ED, out=channels_ED)


@note_maxima.register_fast("triton")
def note_maxima_triton(
    maxima_MD: Tensor, tiles: RowTiles, experts_E: Tensor, channels_ED: Tensor | None = None
) -> None:
    from moefold.kernels.quantise.delayed_tiles_triton import launch_note_maxima

    launch_note_maxima(maxima_MD, tiles, experts_E, channels_ED)


# ---- cases


def scales_of_case(source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None, rule: ScaleRule) -> DelayedScales:
    """Scales for about half of the largest magnitudes."""
    maxima = tile_maxima(source_ND, tiles, index_R)
    most_ED = maxima_of_experts(maxima.columns_MD, tiles)
    most_E1 = most_ED.amax(1, keepdim=True)
    rows_E1 = scale_from_amax(most_E1 * 0.6, rule)
    columns_ED = scale_from_amax(most_ED * 0.4, rule)
    return DelayedScales(rows_E1, columns_ED)


def tiles_and_sources(draw: CaseInputs) -> Iterator[tuple[str, Tensor, RowTiles, Tensor | None]]:
    for name, tiles, index_R in cases_of_tiles(draw.device):
        for width in CASE_WIDTHS:
            about = f"{name} of width {width}"
            rows_RD = draw.normal(len(index_R), width)
            yield about, rows_RD, tiles, None
            tokens_ND = draw.normal(CASE_SOURCES, width)
            yield f"{about}, gathered", tokens_ND, tiles, index_R


@quantise_delayed.register_cases
def quantise_delayed_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, source_ND, tiles, index_R in tiles_and_sources(draw):
        by_channel = scales_of_case(source_ND, tiles, index_R, rule)
        by_expert = DelayedScales(by_channel.rows_E1, by_channel.rows_E1)
        large = DelayedScales(by_channel.rows_E1 * 4, by_channel.columns_EC * 4)
        inputs = (source_ND, tiles, rule)
        yield KernelCase(f"{name}, channels", (*inputs, by_channel, True, True, index_R))
        yield KernelCase(f"{name}, all in range", (*inputs, large, True, True, index_R))
        yield KernelCase(f"{name}, rows alone", (*inputs, by_expert, True, False, index_R))
        yield KernelCase(f"{name}, columns alone", (*inputs, by_expert, False, True, index_R))
        coarse = (source_ND, tiles, ScaleRule(E5M2), by_channel)
        yield KernelCase(f"{name}, e5m2", (*coarse, True, True, index_R))


@note_maxima.register_cases
def note_maxima_cases(draw: CaseInputs) -> Cases:
    for name, source_ND, tiles, index_R in tiles_and_sources(draw):
        maxima = tile_maxima(source_ND, tiles, index_R)
        experts = len(tiles.ends_E)
        width = source_ND.shape[1]
        experts_E = draw.wide(experts, seed=4).abs()
        channels_ED = draw.wide(experts, width, seed=5).abs()
        inputs = (maxima.columns_MD.to(experts_E.dtype), tiles, experts_E)
        yield KernelCase(name, (*inputs, channels_ED))
        yield KernelCase(f"{name}, experts alone", (*inputs, None))
