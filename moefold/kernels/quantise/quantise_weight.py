"""Quantisation of weights in both layouts: (E, N, D) for y = x W^T, and (E, D, N) for dx = dy W.

    "block"     one scale for 128 x 128 values: both layouts hold the same bytes
    "expert"    one scale for a matrix: both layouts hold the same bytes
    "channel"   one scale for each output of the product: for each n in (E, N, D), for each d in (E, D, N)

E experts (1 for a dense layer), N outputs, D inputs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import (
    BLOCK,
    Quantised,
    ScaleRule,
    largest_magnitude,
    round_to_fp8,
    scale_from_amax,
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
    w_EDN = w_END.mT
    if scales == "channel":
        forward = quantise_channels(w_END, rule)
        return QuantisedWeight(forward, quantise_channels(w_EDN, rule))
    amax = block_maxima(w_END) if scales == "block" else largest_magnitude(w_END, (1, 2))[:, None, None]
    scale = scale_from_amax(amax, rule)
    values_END = round_to_fp8(w_END, spread_over_blocks(scale, w_END), rule.format)
    transposed = Quantised(values_END.mT.contiguous(), scale.mT.contiguous())
    return QuantisedWeight(Quantised(values_END, scale), transposed)


class WeightKernels(Protocol):
    """The launches of quantise_weight_triton.py, and those of quantise_weight_launch.py."""

    def launch_quantise_blocks(self, w_END: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def launch_weight_maxima(self, w_END: Tensor) -> tuple[Tensor, Tensor]: ...

    def launch_quantise_with_scales(
        self, w_END: Tensor, rule: ScaleRule, scales_EN: Tensor, scales_ED: Tensor
    ) -> tuple[Tensor, Tensor]: ...


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
) -> QuantisedWeight:  # fmt: skip
    if scales == "block":
        values_END, values_EDN, scales_EIJ, scales_EJI = kernels.launch_quantise_blocks(w_END, rule)
        return QuantisedWeight(Quantised(values_END, scales_EIJ), Quantised(values_EDN, scales_EJI))
    outputs_EN, inputs_ED = kernels.launch_weight_maxima(w_END)
    if scales == "channel":
        scales_EN = scale_from_amax(outputs_EN, rule)
        scales_ED = scale_from_amax(inputs_ED, rule)
        kept = (scales_EN[..., None], scales_ED[..., None])
    else:
        scales_E1 = scale_from_amax(outputs_EN.amax(1, keepdim=True), rule)
        scales_EN = scales_E1.expand_as(outputs_EN)
        scales_ED = scales_E1.expand_as(inputs_ED)
        kept = (scales_E1[..., None], scales_E1[..., None])
    values_END, values_EDN = kernels.launch_quantise_with_scales(w_END, rule, scales_EN, scales_ED)
    return QuantisedWeight(Quantised(values_END, kept[0]), Quantised(values_EDN, kept[1]))


WEIGHT_SCALES: tuple[WeightScales, ...] = ("block", "expert", "channel")


@quantise_weight.register_cases
def quantise_weight_cases(draw: CaseInputs) -> Cases:
    for shape in ((2, 136, 40), (1, 24, 300), (1, 256, 128), (3, 128, 256)):
        w_END = draw.normal(*shape, scale=0.02)
        for scales in WEIGHT_SCALES:
            yield KernelCase(f"{shape}, {scales}", (w_END, scales, ScaleRule()))


def quantise_channels(w_END: Tensor, rule: ScaleRule) -> Quantised:
    scale = scale_from_amax(largest_magnitude(w_END, 2), rule)[..., None]
    values = round_to_fp8(w_END, scale, rule.format)
    return Quantised(values.contiguous(), scale)


def block_maxima(w_END: Tensor) -> Tensor:
    _, n, d = w_END.shape
    padded = torch.nn.functional.pad(w_END, (0, -d % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return largest_magnitude(blocks, (2, 4))


def spread_over_blocks(scale: Tensor, w_END: Tensor) -> Tensor:
    """The scale of every element."""
    if scale.shape[1:] == (1, 1):
        return scale
    _, n, d = w_END.shape
    rows = scale.repeat_interleave(BLOCK, 1)[:, :n]
    return rows.repeat_interleave(BLOCK, 2)[:, :, :d]
