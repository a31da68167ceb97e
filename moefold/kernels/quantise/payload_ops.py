"""FP8 payloads as ops: what fp8_payload.py says of rows and of channels, in one launch each on a GPU.

N rows, D width, B bytes of a payload, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.bound import BoundKernels
from moefold.kernels.quantise.fp8 import BLOCK, E4M3, E5M2, Fp8Format, ScaleRule
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
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op


@register_inner_op
def rows_to_payload(
    x_ND: Tensor,
    rule: ScaleRule,
    block: int = BLOCK,
) -> Tensor:
    """(N, B) bytes, a scale for each block of a row."""
    return pack_rows(quantise_row_blocks(x_ND, rule, block))


@rows_to_payload.register_fast("triton")
def rows_to_payload_triton(
    x_ND: Tensor,
    rule: ScaleRule,
    block: int = BLOCK,
) -> Tensor:
    from moefold.kernels.quantise.payload_triton import launch_rows_to_payload

    return launch_rows_to_payload(x_ND, rule, block)


@register_in_place_op
def sum_payload_rows(
    total_ND: Tensor,
    payload_nNB: Tensor,
    format: Fp8Format,
    block: int = BLOCK,
) -> None:
    """Write the sum of the rows that ranks sent, added in their order in fp32, or in fp64 if `total_ND` is. The payload
    of one rank is dequantised so."""
    sum_dtype = torch.promote_types(total_ND.dtype, torch.float32)
    width = total_ND.shape[1]
    first_NB, *others = payload_nNB
    sum_ND = dequantised_rows(unpack_rows(first_NB, width, format), sum_dtype, block)
    for payload_NB in others:
        sum_ND += dequantised_rows(unpack_rows(payload_NB, width, format), torch.float32, block)
    total_ND.copy_(sum_ND)


@sum_payload_rows.register_fast("triton")
def sum_payload_rows_triton(
    total_ND: Tensor,
    payload_nNB: Tensor,
    format: Fp8Format,
    block: int = BLOCK,
) -> None:
    from moefold.kernels.quantise.payload_triton import launch_sum_payload_rows

    launch_sum_payload_rows(total_ND, payload_nNB, format, block)


@register_inner_op
def channels_to_payload(x_ND: Tensor, rule: ScaleRule) -> Tensor:
    """(B,) bytes, a scale for 128 rows of a channel."""
    return pack_channels(quantise_channels(x_ND, rule))


@channels_to_payload.register_fast("triton")
def channels_to_payload_triton(x_ND: Tensor, rule: ScaleRule) -> Tensor:
    from moefold.kernels.quantise.payload_triton import launch_channels_to_payload

    return launch_channels_to_payload(x_ND, rule)


@register_in_place_op
def payloads_to_channels(
    x_nND: Tensor,
    payload_nB: Tensor,
    format: Fp8Format,
) -> None:
    """Write what the payloads of ranks stand for."""
    _, rows, width = x_nND.shape
    for x_ND, payload_B in zip(x_nND, payload_nB, strict=True):
        channels = unpack_channels(payload_B, width, rows, format)
        x_ND.copy_(dequantised_channels(channels, x_ND.dtype))


@payloads_to_channels.register_fast("triton")
def payloads_to_channels_triton(
    x_nND: Tensor,
    payload_nB: Tensor,
    format: Fp8Format,
) -> None:
    from moefold.kernels.quantise.payload_triton import launch_payloads_to_channels

    launch_payloads_to_channels(x_nND, payload_nB, format)


class PayloadOps(NamedTuple):
    """The implementations that a run uses."""

    pack_rows: Callable[..., Tensor] = rows_to_payload
    sum_rows: Callable[..., None] = sum_payload_rows
    pack_channels: Callable[..., Tensor] = channels_to_payload
    unpack_channels: Callable[..., None] = payloads_to_channels


REFERENCES = PayloadOps()


def payload_ops(kernels: BoundKernels) -> PayloadOps:
    rows = (kernels[rows_to_payload], kernels[sum_payload_rows])
    channels = (kernels[channels_to_payload], kernels[payloads_to_channels])
    return PayloadOps(*rows, *channels)


CASE_ROWS = {
    "blocks": (5, 384, BLOCK),
    "a short block": (3, 140, BLOCK),
    "whole rows": (4, 300, 300),
    "no rows": (0, 256, BLOCK),
}
CASE_RULES = {"e4m3": ScaleRule(), "e5m2": ScaleRule(E5M2), "powers of two": ScaleRule(E4M3, True)}


@rows_to_payload.register_cases
def rows_to_payload_cases(draw: CaseInputs) -> Cases:
    for name, (rows, width, block) in CASE_ROWS.items():
        for about, rule in CASE_RULES.items():
            yield KernelCase(f"{name}, {about}", (draw.normal(rows, width), rule, block))


@sum_payload_rows.register_cases
def sum_payload_rows_cases(draw: CaseInputs) -> Cases:
    for name, (rows, width, block) in CASE_ROWS.items():
        for ranks, rule in ((1, ScaleRule(E5M2)), (3, ScaleRule())):
            total = draw.normal(rows, width)
            parts = [draw.normal(rows, width, seed=rank) for rank in range(ranks)]
            payloads = torch.stack([rows_to_payload(part, rule, block) for part in parts])
            yield KernelCase(f"{name} of {ranks}, {rule.format.name}", (total, payloads, rule.format, block))


CASE_CHANNELS = ((5, 48), (140, 20), (0, 16))


@channels_to_payload.register_cases
def channels_to_payload_cases(draw: CaseInputs) -> Cases:
    for rows, width in CASE_CHANNELS:
        yield KernelCase(f"{rows} x {width}", (draw.normal(rows, width), ScaleRule()))


@payloads_to_channels.register_cases
def payloads_to_channels_cases(draw: CaseInputs) -> Cases:
    for rows, width in CASE_CHANNELS:
        out = draw.normal(2, rows, width)
        parts = [draw.normal(rows, width, seed=rank) for rank in range(2)]
        payloads = torch.stack([channels_to_payload(part, ScaleRule()) for part in parts])
        yield KernelCase(f"{rows} x {width}", (out, payloads, E4M3))
