"""Products of MXFP8 and NVFP4 by the tensor cores of Blackwell, through torch's `scaled_mm` and `scaled_grouped_mm`.

Written to their documented interface and tested with a stand-in for it; never run on a card. What tensor cores read:

    operands   lines along the contraction: left (R, K), right (N, K) as its transpose; E2M1 two values a byte
    scales     one for each block of a line, in tiles of 128 lines by 4 scales (scale_swizzle.py)
    experts    rows in groups by their ends; scales of each group begin at a tile of their own

The fp32 scale of a matrix is applied to finished sums, as in the emulation. Two products are emulated here too: NVFP4
of experts' rows, and the weight gradients of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moefold.config.precision_recipes import MX_BLOCK
from moefold.kernels.bound import BoundKernels
from moefold.kernels.quantise.row_blocks import row_blocks
from moefold.kernels.quantise.scale_swizzle import TILE_ROWS, swizzle_scales
from moefold.precision.micro_formats import MicroFormat, MicroMatrix
from moefold.precision.micro_products import MicroOperand, MicroProducts, WeightMatrix

ScaledProduct = Callable[..., Tensor]  # as torch.nn.functional.scaled_mm


class LineBlocks(NamedTuple):
    """Lines in blocks along the contraction: E4M3, or bytes of two E2M1 values; the scales of each line as bytes."""

    values: Tensor
    scales: Tensor


class HardwareType(NamedTuple):
    """How torch names what a format stores."""

    values: torch.dtype
    scales: torch.dtype
    scaling: ScalingType


MX_TYPE = HardwareType(torch.float8_e4m3fn, torch.float8_e8m0fnu, ScalingType.BlockWise1x32)
NV_TYPE = HardwareType(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, ScalingType.BlockWise1x16)


class HardwareProducts(MicroProducts):
    """Products of operands in a micro format on a card that has it. The two functions are torch's own, but in tests."""

    def __init__(
        self,
        format: MicroFormat,
        kernels: BoundKernels,
        dense: ScaledProduct = F.scaled_mm,
        grouped: ScaledProduct = F.scaled_grouped_mm,  # pyright: ignore[reportAttributeAccessIssue]
    ):
        super().__init__(format, kernels)
        self.dense = dense
        self.grouped = grouped
        self.is_mx = format.block == MX_BLOCK
        self.type = MX_TYPE if self.is_mx else NV_TYPE

    def product(self, a: MicroOperand, b: WeightMatrix) -> Tensor:
        rows = a.rows
        assert rows is not None, "an operand of the weight gradient alone"
        is_grouped = b.matrix.values.dim() == 3
        is_empty = len(rows.values) == 0
        if is_empty or (is_grouped and not self.is_mx):
            return super().product(a, b)
        left = lines_of_matrix(rows)
        right = lines_of_matrix(b.matrix, b.rows)
        if is_grouped:
            y_RN = self.multiply_groups(left, right, a.ends_E)
        else:
            y_RN = self.multiply_lines(left, right)
        return self.scaled_rows(y_RN, a, b)

    def weight(self, dy: MicroOperand, x: MicroOperand, weight: Tensor) -> Tensor | None:
        if weight.dim() == 3 or len(x.columns.values) == 0:
            return super().weight(dy, x, weight)
        left = lines_of_columns(dy.columns)
        right = lines_of_columns(x.columns)
        dw_ND = self.multiply_lines(left, right)
        return self.scaled_gradient(dw_ND[None], dy.columns, x.columns, weight)

    def multiply_lines(self, left: LineBlocks, right: LineBlocks) -> Tensor:
        """(R, N) of lines (R, K) and (N, K), bf16."""
        scaling = self.type.scaling
        swizzle = SwizzleType.SWIZZLE_32_4_4
        a = left.values.view(self.type.values)
        b = right.values.view(self.type.values)
        a_scales = swizzle_scales(left.scales).view(self.type.scales)
        b_scales = swizzle_scales(right.scales).view(self.type.scales)
        return self.dense(a, b.t(), a_scales, scaling, b_scales, scaling, swizzle, swizzle)

    def multiply_groups(self, left: LineBlocks, right: LineBlocks, ends_E: Tensor) -> Tensor:
        """(R, N) of lines (R, K), sorted by expert, and (E, N, K), bf16."""
        scaling = self.type.scaling
        swizzle = SwizzleType.SWIZZLE_32_4_4
        a_scales = scales_by_group(left.scales, ends_E).view(self.type.scales)
        by_expert = [swizzle_scales(scales) for scales in right.scales]
        b_scales = torch.stack(by_expert).view(self.type.scales)
        b = right.values.mT
        return self.grouped(left.values, b, a_scales, scaling, b_scales, scaling, swizzle, swizzle, offs=ends_E)


def lines_of_matrix(matrix: MicroMatrix, lines: int | None = None) -> LineBlocks:
    """The first lines of a matrix, or of each; a scale of a square is one of each of its lines."""
    values = matrix.values
    scales = matrix.block_scales.view(torch.uint8)
    height = values.shape[-2] // scales.shape[-2]
    of_lines = scales.repeat_interleave(height, -2)
    kept_values = values[..., :lines, :].contiguous()
    kept_scales = of_lines[..., :lines, :].contiguous()
    return LineBlocks(kept_values, kept_scales)


def lines_of_columns(columns: MicroMatrix) -> LineBlocks:
    """Of blocks (B, D, K): a line for each of D, blocks one after the other."""
    values_DBK = columns.values.transpose(0, 1)
    scales = columns.block_scales.view(torch.uint8)
    scales_DB1 = scales.transpose(0, 1)
    return LineBlocks(values_DBK.flatten(1).contiguous(), scales_DB1.flatten(1).contiguous())


def scales_by_group(scales_RJ: Tensor, ends_E: Tensor) -> Tensor:
    """Swizzled, each expert's from a tile of its own: (P, J), with P a bound that depends on shapes alone."""
    rows, width = scales_RJ.shape
    blocks = row_blocks(ends_E, rows, TILE_ROWS)
    padded = len(blocks.expert_B) * TILE_ROWS
    placed = scales_RJ.new_zeros(padded + 1, width)  # rows without an expert go to the last row
    placed[blocks.place_R] = scales_RJ
    swizzled = swizzle_scales(placed[:padded])
    return swizzled.view(padded, -1)
