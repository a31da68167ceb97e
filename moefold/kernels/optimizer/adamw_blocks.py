"""One AdamW update of matrices (adamw.py), which also writes their FP8 copies with scales of 128 x 128 blocks.

The copies are those that `quantise_weight` makes of the updated weights, in both layouts, in the memory of the copies
before. E experts, N outputs, D inputs, I blocks of outputs, J blocks of inputs.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moefold.kernels.optimizer.adamw import adamw, adamw_fused
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.split_fp32 import lower_16_bits, round_to_nearest
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.quantise_weight import quantise_weight
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


@register_in_place_op
def adamw_blocks(
    main: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    weights: Tensor | None,
    scale: Tensor,
    scalars: Tensor,
    options: AdamWOptions,
    first: int,
    values_END: Tensor,
    values_EDN: Tensor,
    scales_EIJ: Tensor,
    scales_EJI: Tensor,
    rule: ScaleRule,
    dtype: torch.dtype,
) -> None:
    """`main` to `first` as in adamw.py. `dtype`: the model's, to which weights are rounded before they are
    quantised. A scale that is not finite leaves everything as it is, but that copies may be made again of the same
    weights."""
    adamw(main, g, m, v, weights, scale, scalars, options, first)
    copies = (values_END, values_EDN, scales_EIJ, scales_EJI)
    rewrite_copies(main, weights, scale, copies, rule, dtype)


@adamw_blocks.register_fast("fused")
def adamw_blocks_fused(
    main, g, m, v, weights, scale, scalars, options, first, values_END, values_EDN, scales_EIJ, scales_EJI, rule, dtype
) -> None:
    adamw_fused(main, g, m, v, weights, scale, scalars, options, first)
    copies = (values_END, values_EDN, scales_EIJ, scales_EJI)
    rewrite_copies(main, weights, scale, copies, rule, dtype)


@adamw_blocks.register_fast("triton")
def adamw_blocks_triton(
    main, g, m, v, weights, scale, scalars, options, first, values_END, values_EDN, scales_EIJ, scales_EJI, rule, dtype
) -> None:
    from moefold.kernels.optimizer import adamw_blocks_triton as launch

    copies = (values_END, values_EDN, scales_EIJ, scales_EJI)
    launch.launch_adamw_blocks(main, g, m, v, weights, scale, scalars, options, first, *copies, rule, dtype)


@adamw_blocks.register_fast("gluon")
def adamw_blocks_gluon(
    main, g, m, v, weights, scale, scalars, options, first, values_END, values_EDN, scales_EIJ, scales_EJI, rule, dtype
) -> None:
    """The update in Triton, then copies in Gluon from a second read of the weights."""
    from moefold.kernels.optimizer import adamw_blocks_launch as launch

    copies = (values_END, values_EDN, scales_EIJ, scales_EJI)
    launch.launch_adamw_blocks(main, g, m, v, weights, scale, scalars, options, first, *copies, rule, dtype)


def rewrite_copies(
    main: Tensor,
    weights: Tensor | None,
    scale: Tensor,
    copies: tuple[Tensor, Tensor, Tensor, Tensor],
    rule: ScaleRule,
    dtype: torch.dtype,
) -> None:
    """Quantise the updated weights into the memory of their copies; if nothing was updated, copies stay too."""
    if not scale.isfinite():
        return
    values_END, values_EDN, scales_EIJ, scales_EJI = copies
    updated = main if weights is None else weights
    rounded = round_to_nearest(updated, dtype)
    w_END = rounded.view(values_END.shape)
    made = quantise_weight(w_END, "block", rule)
    values_END.copy_(made.forward.values)
    values_EDN.copy_(made.transposed.values)
    scales_EIJ.copy_(made.forward.scales)
    scales_EJI.copy_(made.transposed.scales)


CASE_SHAPES = ((1, 136, 40), (2, 24, 40))
CASE_OPTIONS = AdamWOptions(0.9, 0.95, 1e-8, 0.1)


@adamw_blocks.register_cases
def adamw_blocks_cases(draw: CaseInputs) -> Cases:
    scale = torch.tensor(0.5, dtype=draw.wide_dtype, device=draw.device)
    now = adamw_scalars(3, 1e-3, CASE_OPTIONS, seed=7)
    scalars = torch.tensor(now, dtype=torch.float64, device=draw.device)
    numbers = (scale, scalars, CASE_OPTIONS, 256)
    for shape in CASE_SHAPES:
        size = prod(shape)
        main = draw.wide(size)
        g = draw.wide(size, seed=1)
        m = draw.wide(size, seed=2)
        root = draw.wide(size, seed=3)
        moments = (g, m, root.square())
        copies = case_copies(draw, shape)
        dtypes = (draw.wide_dtype, draw.dtype)
        for dtype in dict.fromkeys(dtypes):
            name = f"{shape}, {dtype}, no weights beside"
            inputs = (main, *moments, None, *numbers, *copies, dtype)
            yield KernelCase(name, inputs)
        if draw.dtype == draw.wide_dtype:
            continue
        weights = round_to_nearest(main, draw.dtype)
        beside = (weights, *numbers, *copies, draw.dtype)
        inputs = (main, *moments, *beside)
        yield KernelCase(f"{shape}, weights beside", inputs)
        lower = lower_16_bits(main)
        inputs = (lower, *moments, *beside)
        yield KernelCase(f"{shape}, split", inputs, main="split")


def case_copies(draw: CaseInputs, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor, ScaleRule]:
    """Copies of other weights, to be overwritten, and their rule."""
    rule = ScaleRule()
    w_END = draw.normal(*shape, seed=9)
    forward, transposed = quantise_weight(w_END, "block", rule)
    values_END, scales_EIJ = forward
    values_EDN, scales_EJI = transposed
    return values_END, values_EDN, scales_EIJ, scales_EJI, rule
