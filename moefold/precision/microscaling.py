"""Microscaling recipes, MXFP8 and NVFP4, emulated: operands are quantised and stored as these formats have them, and
products multiply what the operands stand for, in fp32 on a CPU and in bf16, which holds it exactly, on a GPU.

Rows, columns and weights are quantised from the source, each for the product that reads it. The weight gradient reads
copies in blocks of rows of one expert; a dense layer is one expert.

R rows, P padded rows in B blocks of K, D inputs, N outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from moefold.layout.counter_random import random_32
from moefold.layout.declare import PartOfTensor
from moefold.layout.weight_copies import cached_copy
from moefold.precision.linear import PlacedWeight
from moefold.precision.micro_formats import MICRO_FORMATS, MicroFormat, MicroMatrix, decode_factor


class MicroOperand(NamedTuple):
    """Rows of an input or a gradient. `padded_ends_E`: where each expert's rows end in the column copy."""

    ends_E: Tensor
    padded_ends_E: Tensor
    rows: MicroMatrix | None
    columns: MicroMatrix

    def along_columns(self) -> MicroOperand:
        return self._replace(rows=None)


class MicroWeight(NamedTuple):
    """Copies of a weight (N, D) or (E, N, D) along D, and of its transpose along N."""

    forward: MicroMatrix
    transposed: MicroMatrix
    outputs: int
    inputs: int


class RowDraws(NamedTuple):
    """Random numbers of the two copies of a gradient; None: rounding to nearest."""

    rows: Tensor | None = None
    columns: Tensor | None = None


class MicroscalingRecipe:
    """The recipe of one product; `name` is the product's, and tells its random numbers from those of others."""

    keeps: KeptOperand = "columns"

    def __init__(
        self, spec: RecipeSpec, options: PrecisionConfig, kernels: BoundKernels, name: str, weight: PlacedWeight
    ):
        self.spec = spec
        self.name = spec.name
        self.row_multiple = spec.row_multiple
        self.format: MicroFormat = MICRO_FORMATS[spec.format](options)
        self.options = options
        self.rounds_by_token = self.format.rounds_stochastically
        self.stream = crc32(f"{options.rounding_seed} {name}".encode()) << 1
        self.numbers = RowNumbering(weight)
        self.products: Products | None = MicroProducts(self.format, kernels)

    def input(self, x: Tensor, rows: ExpertRows | None) -> MicroOperand:
        return self.quantise(x, ends_of_rows(x, rows), None)

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> MicroOperand:
        return self.quantise(dy, ends_of_rows(dy, rows), number_R)

    def weight(self, w: Tensor) -> MicroWeight:
        return cached_copy(w, (self.name, self.options), self.quantise_matrices)

    def state(self) -> Mapping[str, Tensor | PartOfTensor]:
        return {}

    def quantise_matrices(self, w: Tensor) -> MicroWeight:
        matrices = w.detach()
        outputs, inputs = w.shape[-2:]
        return MicroWeight(self.format.weight(matrices), self.format.weight(matrices.mT), outputs, inputs)

    def quantise(self, x: Tensor, ends_E: Tensor, number_R: Tensor | None) -> MicroOperand:
        """Both copies of rows (R, D)."""
        experts = len(ends_E)
        height = self.format.block
        blocks = row_blocks(ends_E, len(x), height)
        draws = RowDraws()
        if number_R is not None:
            row_number_R = self.numbers.of_rows(number_R, blocks.expert_R)
            draws = self.draw(row_number_R, blocks)
        rows = self.format.rows(x, blocks.expert_R, experts, draws.rows)
        x_BDK = rows_to_blocks(x, blocks, height)
        columns = self.format.columns(x_BDK, blocks.expert_B, experts, draws.columns)
        return MicroOperand(ends_E, blocks.ends_E, rows, columns)

    def draw(self, number_R: Tensor, blocks: RowBlocks) -> RowDraws:
        """By row and output; by the block's first row, output and place in the block."""
        height = self.format.block
        column_N = self.numbers.column_N.to(number_R.device)
        rows_RN = random_32(number_R, self.stream, column_N)
        first_B = first_of_blocks(number_R, blocks, height)
        place = torch.arange(height, device=number_R.device)
        column_NK = column_N[:, None] * height + place
        columns = random_32(first_B, self.stream + 1, column_NK.flatten())
        return RowDraws(rows_RN, columns.view(len(first_B), len(column_N), height))


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
            self.experts = shape[0]
            self.first_expert = part[0][0]
            shape = shape[1:]
            part = part[1:]
        outputs = shape[:-1]
        places = torch.arange(prod(outputs)).view(outputs)
        for dim, (first, size) in enumerate(part[:-1]):
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
        y_RN = self.product(x, w.forward, w.outputs, w.inputs)
        if bias is None:
            return y_RN
        return y_RN + bias.to(y_RN.dtype)

    def data(self, dy: MicroOperand, w: MicroWeight, into: Tensor | None) -> Tensor:
        dx_RD = self.product(dy, w.transposed, w.inputs, w.outputs)
        if into is None:
            return dx_RD
        return into.add_(dx_RD)

    def product(self, a: MicroOperand, b: MicroMatrix, outputs: int, inputs: int) -> Tensor:
        assert a.rows is not None, "an operand of the weight gradient alone"
        a_RK = self.values(a.rows)[:, :inputs]
        b_NK = self.values(b)[..., :outputs, :inputs]
        of_rows = decode_factor(a.rows.encode, a_RK.device)
        of_weight = decode_factor(b.encode, a_RK.device)
        if b_NK.dim() == 2:
            y_RN = a_RK @ b_NK.T
        else:
            y_RN = self.multiply_rows(a_RK.contiguous(), b_NK.contiguous(), a.ends_E)
            of_weight = self.by_row(of_weight, a.ends_E, len(a_RK))
        return y_RN.float() * of_rows * of_weight

    def weight(self, dy: MicroOperand, x: MicroOperand, weight: Tensor) -> Tensor | None:
        dy_PN = blocks_to_rows(self.values(dy.columns))
        x_PD = blocks_to_rows(self.values(x.columns))
        if weight.dim() == 2:
            dw = (dy_PN.T @ x_PD)[None]
        else:
            dw = self.multiply_columns(dy_PN.contiguous(), x_PD.contiguous(), x.padded_ends_E)
        of_dy = decode_factor(dy.columns.encode, dw.device)
        of_x = decode_factor(x.columns.encode, dw.device)
        scaled = dw.float() * of_dy * of_x
        return scaled.view(weight.shape).to(weight.dtype)

    def values(self, matrix: MicroMatrix) -> Tensor:
        values = self.format.exact_values(matrix)
        return values.bfloat16() if values.is_cuda else values

    def by_row(self, factor: Tensor, ends_E: Tensor, rows: int) -> Tensor:
        """The factor of each row's expert, (R, 1); 1 behind the last."""
        if factor.dim() == 0:
            return factor
        padded = pad(factor.flatten(), (0, 1), value=1.0)
        return padded[expert_of_rows(ends_E, rows)][:, None]
