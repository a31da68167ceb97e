"""Quantisation of weights in both layouts: (E, N, D) for y = x W^T, and (E, D, N) for dx = dy W.

    "block"     one scale for 128 x 128 values: both layouts hold the same bytes
    "expert"    one scale for a matrix: both layouts hold the same bytes
    "channel"   one scale for each output of the product: for each n in (E, N, D), for each d in (E, D, N)

E experts (1 for a dense layer), N outputs, D inputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from moefold.kernels.quantise.fp8 import (
    SQUARE,
    Layouts,
    Quantised,
    ScaleRule,
    in_whole_blocks,
    largest_magnitude,
    quantise_along,
    round_to_fp8,
    scale_from_amax,
    scale_of_values,
)
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

WeightScales = Literal["block", "expert", "channel"]


class WeightFormat(NamedTuple):
    """The scales of a quantised weight, and the rule of its bytes."""

    scales: WeightScales
    rule: ScaleRule


class QuantisedWeight(NamedTuple):
    """`forward`: values (E, N, D); scales (E, N / 128, D / 128), (E, 1, 1) or (E, N, 1). `transposed`: the same with D
    and N exchanged."""

    forward: Quantised
    transposed: Quantised


@register_inner_op
def quantise_weight(w_END: Tensor, scales: WeightScales, rule: ScaleRule) -> QuantisedWeight:
    if scales == "channel":
        forward = quantise_channels(w_END, rule)
        transposed = quantise_channels(w_END.mT, rule)
        return QuantisedWeight(forward, transposed)
    if scales == "block":
        amax = block_maxima(w_END)
    else:
        amax_E = largest_magnitude(w_END, (1, 2))
        amax = amax_E[:, None, None]
    scale = scale_from_amax(amax, rule)
    every_scale = spread_over_blocks(scale, w_END)
    values_END = round_to_fp8(w_END, every_scale, rule.format)
    values_EDN = values_END.mT.contiguous()
    transposed_scale = scale.mT.contiguous()
    return both_layouts((values_END, values_EDN), (scale, transposed_scale))


def both_layouts(values: Layouts, scales: Layouts) -> QuantisedWeight:
    forward = Quantised(values[0], scales[0])
    transposed = Quantised(values[1], scales[1])
    return QuantisedWeight(forward, transposed)


class WeightKernels(Protocol):
    """The launches of quantise_weight_triton.py, and those of quantise_weight_launch.py."""

    def launch_quantise_blocks(self, w_END: Tensor, rule: ScaleRule) -> tuple[Layouts, Layouts]: ...

    def launch_weight_maxima(self, w_END: Tensor) -> tuple[Tensor, Tensor]: ...

    def launch_quantise_with_scales(self, w_END: Tensor, rule: ScaleRule, scales: Layouts) -> Layouts: ...


@quantise_weight.register_fast("triton")
def quantise_weight_triton(w_END: Tensor, scales: WeightScales, rule: ScaleRule) -> QuantisedWeight:
    from moefold.kernels.quantise import quantise_weight_triton as kernels

    return quantise_with_kernels(kernels, w_END, scales, rule)


@quantise_weight.register_fast("gluon")
def quantise_weight_gluon(w_END: Tensor, scales: WeightScales, rule: ScaleRule) -> QuantisedWeight:
    from moefold.kernels.quantise import quantise_weight_launch as kernels

    return quantise_with_kernels(kernels, w_END, scales, rule)


def quantise_with_kernels(
    kernels: WeightKernels, w_END: Tensor, scales: WeightScales, rule: ScaleRule
) -> QuantisedWeight:
    if scales == "block":
        values, of_blocks = kernels.launch_quantise_blocks(w_END, rule)
        return both_layouts(values, of_blocks)
    from moefold.kernels.quantise.wide_scales_triton import scales_of_maxima

    outputs_EN, inputs_ED = kernels.launch_weight_maxima(w_END)
    if scales == "channel":
        scales_EN = scales_of_maxima(outputs_EN, rule)
        scales_ED = scales_of_maxima(inputs_ED, rule)
        scales_EN1 = scales_EN[..., None]
        scales_ED1 = scales_ED[..., None]
        kept = (scales_EN1, scales_ED1)
    else:
        most_E1 = outputs_EN.amax(1, keepdim=True)
        scales_E1 = scales_of_maxima(most_E1, rule)
        scales_EN = scales_E1.expand_as(outputs_EN)
        scales_ED = scales_E1.expand_as(inputs_ED)
        scales_E11 = scales_E1[..., None]
        kept = (scales_E11, scales_E11)
    scales_of_lines = (scales_EN, scales_ED)
    values = kernels.launch_quantise_with_scales(w_END, rule, scales_of_lines)
    return both_layouts(values, kept)


WEIGHT_SCALES: tuple[WeightScales, ...] = ("block", "expert", "channel")


CASE_SHAPES = [  # E, N, D
    (2, 136, 40),
    (1, 24, 300),
    (1, 256, 128),
    (3, 128, 256),
]


@quantise_weight.register_cases
def quantise_weight_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for shape in CASE_SHAPES:
        w_END = draw.normal(*shape, scale=0.02)
        for scales in WEIGHT_SCALES:
            inputs = (w_END, scales, rule)
            yield KernelCase(f"{shape}, {scales}", inputs)


def quantise_channels(w_END: Tensor, rule: ScaleRule) -> Quantised:
    values, scales_EN = quantise_along(w_END, 2, rule)
    return Quantised(values.contiguous(), scales_EN[..., None])


def block_maxima(w_END: Tensor) -> Tensor:
    w_ENJB = in_whole_blocks(w_END, 2)
    squares = in_whole_blocks(w_ENJB, 1)
    return largest_magnitude(squares, SQUARE)


def spread_over_blocks(scale: Tensor, w_END: Tensor) -> Tensor:
    """The scale of every element."""
    is_of_experts = scale.shape[1:] == (1, 1)
    return scale if is_of_experts else scale_of_values(scale, w_END)
