"""Microscaling recipes, MXFP8 and NVFP4, emulated: operands are quantised and stored as these formats have them, and
products multiply what the operands stand for, in fp32 on a CPU and in bf16, which holds it exactly, on a GPU.

Rows, columns and weights are quantised from the source, each for the product that reads it. The weight gradient reads
copies in blocks of rows of one expert; a dense layer is one expert.

R rows, P padded rows in B blocks of K, D inputs, N outputs, E experts.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefold.config.precision_recipes import RecipeSpec
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.product import ExpertRows, KeptOperand, Products, ends_of_rows
from moefold.kernels.quantise.row_blocks import RowBlocks, blocks_to_rows, expert_of_rows, row_blocks, rows_to_blocks
from moefold.layout.counter_random import RandomCounters, random_counters
from moefold.layout.weight_copies import cached_copy
from moefold.precision.linear import PlacedWeight, RecipeTensors
from moefold.precision.micro_formats import MICRO_FORMATS, MicroFormat, MicroMatrix, MicroSource, decode_factor


class MicroOperand(NamedTuple):
    """Rows of an input or a gradient. `padded_ends_E`: where each expert's rows end in the column copy."""

    ends_E: Tensor
    padded_ends_E: Tensor
    rows: MicroMatrix | None
    columns: MicroMatrix

    def along_columns(self) -> MicroOperand:
        return self._replace(rows=None)


class WeightMatrix(NamedTuple):
    """A matrix, or one for each expert, of so many rows and columns; the values may be padded."""

    matrix: MicroMatrix
    rows: int
    columns: int


class MicroWeight(NamedTuple):
    """Copies of a weight (N, D) or (E, N, D) along D, and of its transpose along N."""

    forward: WeightMatrix
    transposed: WeightMatrix


class RowDraws(NamedTuple):
    """Random numbers of the two copies of a gradient; None: rounding to nearest."""

    rows: RandomCounters | None = None
    columns: RandomCounters | None = None


class MicroscalingRecipe:
    """The recipe of one product; `name` is the product's, and tells its random numbers from those of others."""

    keeps: KeptOperand = "columns"

    def __init__(
        self, spec: RecipeSpec, options: PrecisionConfig, kernels: BoundKernels, name: str, weight: PlacedWeight
    ):
        self.spec = spec
        self.name = spec.name
        self.row_multiple = spec.row_multiple
        self.options = options
        make_format = MICRO_FORMATS[spec.format]
        self.format: MicroFormat = make_format(options, kernels)
        self.rounds_by_token = self.format.rounds_stochastically
        seed_and_name = f"{options.rounding_seed} {name}"
        hashed = crc32(seed_and_name.encode())
        self.stream = hashed << 1
        self.numbers = RowNumbering(weight)
        products = MicroProducts(self.format, kernels)
        self.products: Products | None = products

    def input(self, x: Tensor, rows: ExpertRows | None) -> MicroOperand:
        ends_E = ends_of_rows(x, rows)
        return self.quantise(x, ends_E, None)

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> MicroOperand:
        ends_E = ends_of_rows(dy, rows)
        return self.quantise(dy, ends_E, number_R)

    def weight(self, w: Tensor) -> MicroWeight:
        format = (self.name, self.options)
        return cached_copy(w, format, self.quantise_matrices)

    def state(self) -> RecipeTensors:
        return {}

    def quantise_matrices(self, w: Tensor) -> MicroWeight:
        matrices = w.detach()
        forward = self.quantise_matrix(matrices)
        transposed = self.quantise_matrix(matrices.mT)
        return MicroWeight(forward, transposed)

    def quantise_matrix(self, w: Tensor) -> WeightMatrix:
        *_, rows, columns = w.shape
        matrix = self.format.weight(w)
        return WeightMatrix(matrix, rows, columns)

    def quantise(self, x: Tensor, ends_E: Tensor, number_R: Tensor | None) -> MicroOperand:
        """Both copies of rows (R, D)."""
        count = len(x)
        experts = len(ends_E)
        height = self.format.block
        blocks = row_blocks(ends_E, count, height)
        expert_R = blocks.expert_R
        draws = RowDraws()
        if number_R is not None:
            row_number_R = self.numbers.of_rows(number_R, expert_R)
            draws = self.draw(row_number_R, blocks)
        along_rows = MicroSource(x, expert_R, experts, draws.rows)
        rows = self.format.rows(along_rows)
        x_BDK = rows_to_blocks(x, blocks, height)
        expert_B = blocks.expert_B
        along_columns = MicroSource(x_BDK, expert_B, experts, draws.columns)
        columns = self.format.columns(along_columns)
        return MicroOperand(ends_E, blocks.ends_E, rows, columns)

    def draw(self, number_R: Tensor, blocks: RowBlocks) -> RowDraws:
        """By row and output; by the block's first row, output and place in the block."""
        device = number_R.device
        column_N = self.numbers.column_N.to(device)
        rows = random_counters(number_R, self.stream, column_N)
        # Blocks of K rows
        height = self.format.block
        first_B = first_of_blocks(number_R, blocks, height)
        place_K = torch.arange(height, device=device)
        column_N1 = column_N[:, None]
        column_NK = column_N1 * height + place_K
        values = column_NK.flatten()
        stream = self.stream + 1
        columns = random_counters(first_B, stream, values)
        return RowDraws(rows, columns)


def first_of_blocks(number_R: Tensor, blocks: RowBlocks, height: int) -> Tensor:
    """The number of each block's first row."""
    padded = len(blocks.expert_B) * height
    number_P = number_R.new_zeros(padded + 1)
    number_P[blocks.place_R] = number_R
    return number_P[:padded:height]


class RowNumbering:
    """Numbers of a product's rows and outputs, the same on any layout. `column_N`: the place of each output held here,
    in the whole weight. The rows of a token with several experts have different numbers."""

    def __init__(self, weight: PlacedWeight):
        declaration, world = weight
        shape = declaration.shape
        part = declaration.part(world)
        self.experts = 1
        self.first_expert = 0
        if declaration.stacked:
            self.experts, *shape = shape
            (self.first_expert, _), *part = part
        outputs = shape[:-1]
        part_of_outputs = part[:-1]
        count = prod(outputs)
        flat_places = torch.arange(count)
        places = flat_places.view(outputs)
        for dim, (first, size) in enumerate(part_of_outputs):
            places = places.narrow(dim, first, size)
        self.column_N = places.flatten()

    def of_rows(self, number_R: Tensor, expert_R: Tensor) -> Tensor:
        return number_R * self.experts + self.first_expert + expert_R


class MicroProducts:
    """The products of operands in a micro format. The scale of a whole matrix is applied to finished sums."""

    def __init__(self, format: MicroFormat, kernels: BoundKernels):
        self.format = format
        self.multiply_rows = kernels[grouped_gemm]
        self.multiply_columns = kernels[grouped_gemm_weight]

    def forward(self, x: MicroOperand, w: MicroWeight, bias: Tensor | None) -> Tensor:
        y_RN = self.product(x, w.forward)
        if bias is None:
            return y_RN
        bias_N = bias.to(y_RN.dtype)
        return y_RN + bias_N

    def data(self, dy: MicroOperand, w: MicroWeight, into: Tensor | None) -> Tensor:
        dx_RD = self.product(dy, w.transposed)
        if into is None:
            return dx_RD
        return into.add_(dx_RD)

    def product(self, a: MicroOperand, b: WeightMatrix) -> Tensor:
        rows = a.rows
        assert rows is not None, "an operand of the weight gradient alone"
        padded_a = self.values(rows)
        padded_b = self.values(b.matrix)
        a_RK = padded_a[:, : b.columns]
        b_NK = padded_b[..., : b.rows, : b.columns]
        device = a_RK.device
        of_rows = decode_factor(rows.encode, device)
        of_weight = decode_factor(b.matrix.encode, device)
        if b_NK.dim() == 2:
            y_RN = a_RK @ b_NK.T
        else:
            left = a_RK.contiguous()
            right = b_NK.contiguous()
            y_RN = self.multiply_rows(left, right, a.ends_E)
            count = len(a_RK)
            expert_R = expert_of_rows(a.ends_E, count)
            of_weight = factor_of_experts(of_weight, expert_R)
        return y_RN.float() * of_rows * of_weight

    def weight(self, dy: MicroOperand, x: MicroOperand, weight: Tensor) -> Tensor | None:
        dy_PN = self.padded_rows(dy)
        x_PD = self.padded_rows(x)
        if weight.dim() == 2:
            product = dy_PN.T @ x_PD
            dw_END = product[None]
        else:
            left = dy_PN.contiguous()
            right = x_PD.contiguous()
            dw_END = self.multiply_columns(left, right, x.padded_ends_E)
        device = dw_END.device
        dy_encode = dy.columns.encode
        x_encode = x.columns.encode
        of_dy = decode_factor(dy_encode, device)
        of_x = decode_factor(x_encode, device)
        scaled_END = dw_END.float() * of_dy * of_x
        scaled = scaled_END.view(weight.shape)
        return scaled.to(weight.dtype)

    def padded_rows(self, operand: MicroOperand) -> Tensor:
        """Rows of the column copy."""
        values_BDK = self.values(operand.columns, transposed=True)
        return blocks_to_rows(values_BDK)

    def values(self, matrix: MicroMatrix, transposed: bool = False) -> Tensor:
        dtype = torch.bfloat16 if matrix.values.is_cuda else torch.float32
        return self.format.exact_values(matrix, dtype, transposed)


def factor_of_experts(factor: Tensor, expert_R: Tensor) -> Tensor:
    """The factor of each row's expert, (R, 1); 1 for a row without an expert, or where all have the same."""
    if factor.dim() == 0:
        return factor
    factor_E = factor.flatten()
    padded_E = pad(factor_E, (0, 1), value=1.0)
    factor_R = padded_E[expert_R]
    return factor_R[:, None]
