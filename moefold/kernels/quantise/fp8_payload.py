"""FP8 payloads: bytes and scales of a tensor as one tensor of bytes, which any collective can carry.

    rows       (N, D + 4 J) bytes: the values of a row, then the scales of its J blocks of 128 values, or of all of it
    channels   one flat tensor: values (N, D), then scales (G, D) of groups of 128 rows of a channel

The scales of a row travel with the row, so a dispatcher sends payloads of rows as it sends rows: to any rank, in any
order, in several copies. FP32 scales; numbers and rounding are those of fp8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import (
    BLOCK,
    E4M3,
    Fp8Format,
    Quantised,
    ScaleRule,
    blocks_for,
    from_blocks,
    in_whole_blocks,
    quantise_along,
)

SCALE_BYTES = 4


def row_payload_bytes(width: int, block: int = BLOCK) -> int:
    """Bytes of one row's payload, scales included."""
    blocks = blocks_for(width, block)
    return width + SCALE_BYTES * blocks


def quantise_row_blocks(x_ND: Tensor, rule: ScaleRule, block: int = BLOCK) -> Quantised:
    """Values (N, D) and a scale for each block of a row, (N, J). The last block may be shorter."""
    width = x_ND.shape[1]
    blocks_NJB = in_whole_blocks(x_ND, 1, block)
    values_NJB, scales_NJ = quantise_along(blocks_NJB, 2, rule)
    values_ND = from_blocks(values_NJB, 1, width)
    return Quantised(values_ND, scales_NJ)


def dequantised_rows(rows: Quantised, dtype: torch.dtype, block: int = BLOCK) -> Tensor:
    """What the bytes stand for: one product of fp32, then rounded to the dtype."""
    width = rows.values.shape[1]
    values_ND = rows.values.float()
    values_NJB = in_whole_blocks(values_ND, 1, block)
    scales_NJ1 = rows.scales[..., None]
    wide_NJB = values_NJB * scales_NJ1
    wide_ND = from_blocks(wide_NJB, 1, width)
    return wide_ND.to(dtype)


def pack_rows(rows: Quantised) -> Tensor:
    """(N, D + 4 J) bytes."""
    values = bytes_of(rows.values)
    scales = bytes_of(rows.scales)
    return torch.cat((values, scales), 1)


def unpack_rows(payload_NB: Tensor, width: int, format: Fp8Format) -> Quantised:
    value_bytes = payload_NB[:, :width]
    scale_bytes = payload_NB[:, width:]
    values = viewed_as(value_bytes, format.dtype)
    scales = viewed_as(scale_bytes, torch.float32)
    return Quantised(values, scales)


def bytes_of(x: Tensor) -> Tensor:
    return viewed_as(x, torch.uint8)


def viewed_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a copy of x as another dtype: a view of x itself needs strides that a part of a tensor lacks."""
    copy = x.clone(memory_format=torch.contiguous_format)
    return copy.view(dtype)


def quantise_channels(x_ND: Tensor, rule: ScaleRule) -> Quantised:
    """Values (N, D) and a scale for each channel of each group of 128 rows, (G, D). The last group may be shorter."""
    rows = len(x_ND)
    groups_GBD = in_whole_blocks(x_ND, 0)
    values_GBD, scales_GD = quantise_along(groups_GBD, 1, rule)
    values_ND = from_blocks(values_GBD, 0, rows)
    return Quantised(values_ND, scales_GD)


def dequantised_channels(channels: Quantised, dtype: torch.dtype) -> Tensor:
    values_ND = channels.values.float()
    values_GBD = in_whole_blocks(values_ND, 0)
    scales_G1D = channels.scales[:, None]
    wide_GBD = values_GBD * scales_G1D
    rows = len(values_ND)
    wide_ND = from_blocks(wide_GBD, 0, rows)
    return wide_ND.to(dtype)


def pack_channels(channels: Quantised) -> Tensor:
    values = bytes_of(channels.values)
    scales = bytes_of(channels.scales)
    parts = (values.flatten(), scales.flatten())
    return torch.cat(parts)


def unpack_channels(payload: Tensor, width: int, rows: int, format: Fp8Format = E4M3) -> Quantised:
    count = rows * width
    value_bytes = payload[:count]
    scale_bytes = payload[count:]
    values = value_bytes.view(format.dtype)
    values_ND = values.view(rows, width)
    scales = viewed_as(scale_bytes, torch.float32)
    scales_GD = scales.view(-1, width)
    return Quantised(values_ND, scales_GD)
