"""FP8 sums over tensor-parallel ranks: the reduce-scatter behind attention and dense MLPs, and its backward.

    forward    every rank's summand in E4M3, a scale for each token, by all-to-all; each rank sums its tokens in fp32
    backward   the gradient of each rank's tokens in E4M3, a scale for 128 tokens of a channel, by all-gather

All summands are quantised, this rank's own too, so that a token's sum does not depend on the rank that takes it. Sums
are taken in the order of ranks.

C tokens of all tp ranks together, T of this rank, n ranks, D width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_gather_no_grad, all_to_all_no_grad, reduce_scatter_no_grad
from moefold.config.run import PrecisionConfig
from moefold.kernels.quantise.fp8 import E4M3, ScaleRule
from moefold.kernels.quantise.fp8_payload import (
    dequantised_channels,
    dequantised_rows,
    pack_channels,
    pack_rows,
    quantise_channels,
    quantise_row_blocks,
    unpack_channels,
    unpack_rows,
)
from moefold.layout.axes import Axis, World


class ScatterFormat(NamedTuple):
    """Which directions are quantised, and the rule of their scales."""

    forward: bool
    backward: bool
    rule: ScaleRule


def scatter_sums_fp8(summand_CD: Tensor, axis: Axis, format: ScatterFormat) -> Tensor:
    return ScatterSums.apply(summand_CD, axis, format)  # pyright: ignore[reportReturnType]


class ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, summand_CD, axis, format):
        ctx.way_back = (axis, format)
        if not format.forward:
            return reduce_scatter_no_grad(summand_CD, axis)
        return sum_of_payloads(summand_CD, axis, format.rule)

    @staticmethod
    def backward(ctx, *gradients):
        axis, format = ctx.way_back
        dy_TD = gradients[0].contiguous()
        if not format.backward:
            dx_CD = all_gather_no_grad(dy_TD, axis)
        else:
            dx_CD = gathered_payloads(dy_TD, axis, format.rule)
        return dx_CD, None, None


def sum_of_payloads(summand_CD: Tensor, axis: Axis, rule: ScaleRule) -> Tensor:
    tokens, width = summand_CD.shape
    each = [tokens // axis.size] * axis.size
    payload_CB = pack_rows(quantise_row_blocks(summand_CD, rule, width))
    arrived_CB = all_to_all_no_grad(payload_CB, each, each, axis, what="sums")
    arrived = unpack_rows(arrived_CB, width, rule.format)
    wide_CD = dequantised_rows(arrived, torch.float32, width)
    first_TD, *others = wide_CD.split(each)
    total_TD = first_TD.clone()
    for part_TD in others:
        total_TD += part_TD
    return total_TD.to(summand_CD.dtype)


def gathered_payloads(dy_TD: Tensor, axis: Axis, rule: ScaleRule) -> Tensor:
    tokens, width = dy_TD.shape
    payload = pack_channels(quantise_channels(dy_TD, rule))
    gathered_nB = all_gather_no_grad(payload[None], axis)
    parts: list[Tensor] = []
    for part in gathered_nB:
        channels = unpack_channels(part, width, tokens, rule.format)
        part_TD = dequantised_channels(channels, dy_TD.dtype)
        parts.append(part_TD)
    return torch.cat(parts)


@runtime_checkable
class SumsOverTp(Protocol):
    """A module that scatters sums over tp."""

    scatter_sums: object


class ScattersInFp8:
    """What such a module calls."""

    def __init__(self, axis: Axis, format: ScatterFormat):
        self.axis = axis
        self.format = format

    def __call__(self, summand_CD: Tensor) -> Tensor:
        return scatter_sums_fp8(summand_CD, self.axis, self.format)


def attach_fp8_sums(model: nn.Module, world: World, precision: PrecisionConfig) -> None:
    """Let the modules of a model scatter their sums in FP8, as configured."""
    forward = precision.tp_sums == "fp8"
    backward = precision.tp_sum_gradients == "fp8"
    tp = world.axis("tp")
    quantises = forward or backward
    if tp.size == 1 or not quantises:
        return
    rule = ScaleRule(E4M3, precision.power_of_two_scales)
    format = ScatterFormat(forward, backward, rule)
    scatter = ScattersInFp8(tp, format)
    for module in model.modules():
        if isinstance(module, SumsOverTp):
            module.scatter_sums = scatter
