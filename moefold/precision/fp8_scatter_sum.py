"""FP8 sums over tensor-parallel ranks: the reduce-scatter behind attention and dense MLPs, and its backward.

    forward    every rank's summand in E4M3, a scale for each token, by all-to-all; each rank sums its tokens in fp32
    backward   the gradient of each rank's tokens in E4M3, a scale for 128 tokens of a channel, by all-gather

All summands are quantised, this rank's own too, so that a token's sum does not depend on the rank that takes it. Sums
are taken in the order of ranks.

C tokens of all tp ranks together, T of this rank, n ranks, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_no_grad, all_to_all_no_grad, reduce_scatter_no_grad
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.quantise.fp8 import E4M3, ScaleRule
from moefold.kernels.quantise.payload_ops import REFERENCES, PayloadOps, payload_ops
from moefold.layout.axes import Axis, World


class ScatterFormat(NamedTuple):
    """Which directions are quantised, the rule of their scales, and what makes and reads payloads."""

    forward: bool
    backward: bool
    rule: ScaleRule
    payloads: PayloadOps = REFERENCES


def scatter_sums_fp8(
    summand_CD: Tensor,
    axis: Axis,
    format: ScatterFormat,
) -> Tensor:
    return ScatterSums.apply(summand_CD, axis, format)  # pyright: ignore[reportReturnType]


class ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        summand_CD,
        axis,
        format,
    ):
        ctx.way_back = (axis, format)
        if not format.forward:
            return reduce_scatter_no_grad(summand_CD, axis)
        return sum_of_payloads(summand_CD, axis, format)

    @staticmethod
    def backward(ctx, *gradients):
        axis, format = ctx.way_back
        dy_TD = gradients[0].contiguous()
        if not format.backward:
            dx_CD = all_gather_no_grad(dy_TD, axis)
        else:
            dx_CD = gathered_payloads(dy_TD, axis, format)
        return dx_CD, None, None


def sum_of_payloads(
    summand_CD: Tensor,
    axis: Axis,
    format: ScatterFormat,
) -> Tensor:
    tokens, width = summand_CD.shape
    each = tokens // axis.size
    payload_CB = format.payloads.pack_rows(summand_CD, format.rule, width)
    sizes = [each] * axis.size
    arrived_CB = all_to_all_no_grad(payload_CB, sizes, sizes, axis, what="sums")
    arrived_nTB = arrived_CB.unflatten(0, (axis.size, each))
    total_TD = summand_CD.new_empty((each, width))
    format.payloads.sum_rows(total_TD, arrived_nTB, format.rule.format, width)
    return total_TD


def gathered_payloads(
    dy_TD: Tensor,
    axis: Axis,
    format: ScatterFormat,
) -> Tensor:
    payload = format.payloads.pack_channels(dy_TD, format.rule)
    gathered_nB = all_gather_no_grad(payload[None], axis)
    dx_nTD = dy_TD.new_empty((axis.size, *dy_TD.shape))
    format.payloads.unpack_channels(dx_nTD, gathered_nB, format.rule.format)
    return dx_nTD.flatten(0, 1)


def fp8_sums_over_tp(
    world: World,
    precision: PrecisionConfig,
    kernels: BoundKernels,
) -> Callable[[Tensor], Tensor] | None:
    """What scatters sums over tp in FP8, as configured; None: nothing is sent in FP8."""
    forward = precision.tp_sums == "fp8"
    backward = precision.tp_sum_gradients == "fp8"
    tp = world.axis("tp")
    quantises = forward or backward
    if tp.is_alone or not quantises:
        return None
    rule = ScaleRule(E4M3, precision.power_of_two_scales)
    format = ScatterFormat(forward, backward, rule, payload_ops(kernels))
    return partial(scatter_sums_fp8, axis=tp, format=format)
