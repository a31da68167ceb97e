"""Scales that are wider than a tile, from the largest magnitudes of tiles: of rows, channels, experts, or all tokens.

    "row"       rows: one for each; columns: one for each channel over an expert's rows
    "expert"    one for the rows of each expert, along rows and along columns
    "tensor"    one for all rows

Scales are spread as `quantise_tiles` takes them: (P,) along rows, (M, D) along columns.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule, scale_from_amax
from moefold.kernels.quantise.quantise_tiles import CASE_WIDTHS, TileMaxima, tile_maxima
from moefold.kernels.quantise.row_tiles import RowTiles, cases_of_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

WideKind = Literal["row", "expert", "tensor"]


class WideScales(NamedTuple):
    """`rows_P` is None where each row has a scale of its own and those are not wanted."""

    rows_P: Tensor | None
    columns_MD: Tensor


@register_inner_op
def wide_scales(maxima: TileMaxima, tiles: RowTiles, kind: WideKind, rule: ScaleRule) -> WideScales:
    if kind == "row":
        rows_P = None if maxima.rows_P is None else scale_from_amax(maxima.rows_P, rule)
        channels_MD = expert_maxima(maxima.columns_MD, tiles)
        columns_MD = scale_from_amax(channels_MD, rule)
        return WideScales(rows_P, columns_MD)
    most_M1 = maxima_of_tiles(maxima)
    if kind == "tensor":
        most_1 = most_M1.amax(0)
        most_M1 = most_1.expand_as(most_M1)
    else:
        most_M1 = expert_maxima(most_M1, tiles)
    scale_M1 = scale_from_amax(most_M1, rule)
    return spread_over_tiles(scale_M1, maxima)


@wide_scales.register_fast("triton")
def wide_scales_triton(maxima: TileMaxima, tiles: RowTiles, kind: WideKind, rule: ScaleRule) -> WideScales:
    from moefold.kernels.quantise import wide_scales_triton as launch

    if kind == "row":
        rows_P = None if maxima.rows_P is None else launch.scales_of_maxima(maxima.rows_P, rule)
        columns_MD = launch.scales_of_experts(maxima.columns_MD, tiles, rule)
        return WideScales(rows_P, columns_MD)
    most_M1 = maxima_of_tiles(maxima)
    if kind == "tensor":
        most_1 = most_M1.amax(0)
        scale_1 = launch.scales_of_maxima(most_1, rule)
        scale_M1 = scale_1.expand_as(most_M1)
    else:
        scale_M1 = launch.scales_of_experts(most_M1, tiles, rule)
    return spread_over_tiles(scale_M1, maxima)


def maxima_of_tiles(maxima: TileMaxima) -> Tensor:
    """The largest magnitude of each tile, (M, 1)."""
    maxima_MD = maxima.columns_MD
    return maxima_MD.amax(1, keepdim=True)


def spread_over_tiles(scale_M1: Tensor, maxima: TileMaxima) -> WideScales:
    """One scale of each tile, for its rows and for its columns."""
    rows_P = repeat_for_rows(scale_M1)
    columns_MD = scale_M1.expand_as(maxima.columns_MD)
    columns_MD = columns_MD.contiguous()
    return WideScales(rows_P, columns_MD)


def expert_maxima(maxima_MD: Tensor, tiles: RowTiles) -> Tensor:
    """The largest of each column over all tiles of an expert, for each of these tiles."""
    most_ED = maxima_of_experts(maxima_MD, tiles)
    expert_M = expert_of_tiles(tiles)
    return most_ED[expert_M]


def maxima_of_experts(maxima_MD: Tensor, tiles: RowTiles) -> Tensor:
    """The largest of each column over all tiles of an expert, (E, D). Tiles not in use hold zeros."""
    expert_M = expert_of_tiles(tiles)
    expert_M1 = expert_M[:, None]
    expert_MD = expert_M1.expand_as(maxima_MD)
    experts = len(tiles.ends_E)
    width = maxima_MD.shape[1]
    most_ED = maxima_MD.new_zeros(experts, width)
    return most_ED.scatter_reduce(0, expert_MD, maxima_MD, "amax")


def expert_of_tiles(tiles: RowTiles) -> Tensor:
    expert_M = tiles.tiles_M4[:, 0]
    return expert_M.long()


def scales_of_tiles(scales_ED: Tensor, tiles: RowTiles) -> Tensor:
    """Scales of experts, (E, D) or (E, 1), at each of their tiles."""
    expert_M = expert_of_tiles(tiles)
    return scales_ED[expert_M]


def repeat_for_rows(scales_M1: Tensor) -> Tensor:
    """One scale of each tile, for each of its rows: (P,)."""
    scales_MB = scales_M1.expand(-1, BLOCK)
    return scales_MB.flatten()


WIDE_KINDS: tuple[WideKind, ...] = ("row", "expert", "tensor")


@wide_scales.register_cases
def wide_scales_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, tiles, index_R in cases_of_tiles(draw.device):
        for width in CASE_WIDTHS:
            rows = len(index_R)
            source_RD = draw.normal(rows, width)
            maxima = tile_maxima(source_RD, tiles)
            for kind in WIDE_KINDS:
                inputs = (maxima, tiles, kind, rule)
                yield KernelCase(f"{name} of width {width}, {kind}", inputs)
            columns_alone = maxima._replace(rows_P=None)
            yield KernelCase(f"{name} of width {width}, channels alone", (columns_alone, tiles, "row", rule))
