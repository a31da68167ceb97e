"""The launches of the Gluon kernels that quantise weights. Imported only where Triton is."""

# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from torch import Tensor

from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.quantise_weight_hopper import (
    quantise_blocks_kernel,
    quantise_with_scales_kernel,
    weight_maxima_kernel,
)
from moefold.kernels.quantise.quantise_weight_triton import (
    WeightMaxima,
    empty_layouts,
    empty_maxima,
    empty_scales,
    grid_of_blocks,
)

ROOM = {"num_warps": 8, "maxnreg": 128}  # two programs share a multiprocessor: one loads while the other stores


def launch_quantise_blocks(w_END: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values (E, N, D) and (E, D, N), scales (E, I, J) and (E, J, I)."""
    _, n, d = w_END.shape
    outputs = (*empty_layouts(w_END, rule), *empty_scales(w_END))
    constants = (rule.format.largest, rule.power_of_two)
    quantise_blocks_kernel[grid_of_blocks(w_END)](w_END.contiguous(), *outputs, n, d, *constants, **ROOM)
    return outputs


def launch_weight_maxima(w_END: Tensor) -> WeightMaxima:
    _, n, d = w_END.shape
    outputs_JEN, inputs_IED = empty_maxima(w_END)
    weight_maxima_kernel[grid_of_blocks(w_END)](w_END.contiguous(), outputs_JEN, inputs_IED, n, d, **ROOM)
    return WeightMaxima(outputs_JEN.amax(0), inputs_IED.amax(0))


def launch_quantise_with_scales(
    w_END: Tensor, rule: ScaleRule, scales_EN: Tensor, scales_ED: Tensor
) -> tuple[Tensor, Tensor]:
    """Values (E, N, D) with a scale for each output, and (E, D, N) with one for each input."""
    _, n, d = w_END.shape
    values = empty_layouts(w_END, rule)
    inputs = (w_END.contiguous(), *values, scales_EN.contiguous(), scales_ED.contiguous(), n, d)
    quantise_with_scales_kernel[grid_of_blocks(w_END)](*inputs, **ROOM)
    return values
