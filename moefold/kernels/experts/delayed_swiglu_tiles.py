"""SwiGLU's gradient of rows in tiles, quantised in the same pass with scales that are known before
(kernels/quantise/delayed_tiles.py; swiglu_tiles.py has the formulas, and scales of 128 values).

P padded rows in M tiles, R rows, F inner width, N = 2F.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefold.kernels.experts.fp8_swiglu import Kept, swiglu_gradients
from moefold.kernels.experts.swiglu_tiles import kept_cases
from moefold.kernels.quantise.delayed_tiles import DelayedScales, DelayedTiles, quantise_delayed, scales_of_case
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles
from moefold.kernels.quantise.row_tiles import RowTiles, pad_to_tiles, padded_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


class GradientScales(NamedTuple):
    """Rules and scales of dh and of a."""

    dh_rule: ScaleRule
    dh: DelayedScales
    a_rule: ScaleRule
    a: DelayedScales


class DelayedGradient(NamedTuple):
    """dh (P, N) along rows and along columns, a (P, F) along columns, the gradient of the router's weights (R,). The
    count of a's saturated values is that of both its copies: the one along rows is made in an epilogue of forward
    (fp8_swiglu.py), which does not count."""

    dh: DelayedTiles
    a: DelayedTiles
    dweight_R: Tensor


@register_inner_op
def quantise_delayed_gradient(
    da_RF: Tensor, h: Kept, weight_R: Tensor, tiles: RowTiles, scales: GradientScales
) -> DelayedGradient:
    da_PF = pad_to_tiles(da_RF, tiles)
    dh_PN, a_PF, dweight_R = swiglu_gradients(da_PF, h, weight_R, tiles)
    dh_rule, dh_scales, a_rule, a_scales = scales
    padded = padded_tiles(tiles)
    quantise = quantise_delayed.reference
    dh = quantise(dh_PN, padded, dh_rule, dh_scales, True, True)
    a = quantise(a_PF, padded, a_rule, a_scales, True, True)
    a_columns = QuantisedTiles(None, a.copies.columns)
    return DelayedGradient(dh, a._replace(copies=a_columns), dweight_R)


@quantise_delayed_gradient.register_fast("gluon")
def quantise_delayed_gradient_gluon(
    da_RF: Tensor, h: Kept, weight_R: Tensor, tiles: RowTiles, scales: GradientScales
) -> DelayedGradient:
    """Tiles that are not in use are not written: theirs are undefined."""
    from moefold.kernels.experts.swiglu_tiles_launch import launch_delayed_gradient

    dh, a, dweight_R = launch_delayed_gradient(da_RF, h, weight_R, tiles, *scales)
    return DelayedGradient(dh, a, dweight_R)


# ---- cases


@quantise_delayed_gradient.register_cases
def quantise_delayed_gradient_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, inputs in kept_cases(draw):
        da_RF, h, weight_R, tiles = inputs
        da_PF = pad_to_tiles(da_RF, tiles)
        exact = swiglu_gradients(da_PF, h, weight_R, tiles)
        padded = padded_tiles(tiles)
        dh = twice_as_large(scales_of_case(exact.dh_PN, padded, None, rule))
        a = twice_as_large(scales_of_case(exact.a_PF, padded, None, rule))
        of_experts = GradientScales(rule, one_each(dh), rule, one_each(a))
        yield KernelCase(f"{name}, channels", (*inputs, GradientScales(rule, dh, rule, a)))
        yield KernelCase(f"{name}, experts", (*inputs, of_experts))


def twice_as_large(scales: DelayedScales) -> DelayedScales:
    """Such that few values or none are near the end of the range: another order of sums would change their number."""
    rows_E1, columns_EC = scales
    return DelayedScales(rows_E1 * 4, columns_EC * 4)


def one_each(scales: DelayedScales) -> DelayedScales:
    return DelayedScales(scales.rows_E1, scales.rows_E1)
