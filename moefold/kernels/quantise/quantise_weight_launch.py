"""The launches of the Gluon kernels that quantise weights. Imported only where Triton is."""

# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from torch import Tensor

from moefold.kernels.quantise.fp8 import Layouts, ScaleRule
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


def launch_quantise_blocks(w_END: Tensor, rule: ScaleRule) -> tuple[Layouts, Layouts]:
    """Values (E, N, D) and (E, D, N), scales (E, I, J) and (E, J, I)."""
    values = empty_layouts(w_END, rule)
    scales = empty_scales(w_END)
    write_blocks(w_END, values, scales, rule)
    return values, scales


def write_blocks(w_END: Tensor, values: Layouts, scales: Layouts, rule: ScaleRule) -> None:
    """The same into given memory."""
    _, n, d = w_END.shape
    w_END = w_END.contiguous()
    launch = quantise_blocks_kernel[grid_of_blocks(w_END)]
    constants = (rule.format.largest, rule.power_of_two)
    launch(w_END, *values, *scales, n, d, *constants, **ROOM)


def launch_weight_maxima(w_END: Tensor) -> WeightMaxima:
    _, n, d = w_END.shape
    w_END = w_END.contiguous()
    outputs_JEN, inputs_IED = empty_maxima(w_END)
    launch = weight_maxima_kernel[grid_of_blocks(w_END)]
    launch(w_END, outputs_JEN, inputs_IED, n, d, **ROOM)
    outputs_EN = outputs_JEN.amax(0)
    inputs_ED = inputs_IED.amax(0)
    return WeightMaxima(outputs_EN, inputs_ED)


def launch_quantise_with_scales(w_END: Tensor, rule: ScaleRule, scales: Layouts) -> Layouts:
    """Values (E, N, D) with a scale for each output, (E, N), and (E, D, N) with one for each input, (E, D)."""
    _, n, d = w_END.shape
    w_END = w_END.contiguous()
    scales_EN = scales[0].contiguous()
    scales_ED = scales[1].contiguous()
    values = empty_layouts(w_END, rule)
    launch = quantise_with_scales_kernel[grid_of_blocks(w_END)]
    launch(w_END, *values, scales_EN, scales_ED, n, d, **ROOM)
    return values
