"""Microscaling recipes, MXFP8 and NVFP4: operands are quantised and stored as these formats have them. Products are
emulated (micro_products.py), or those of a card that has the formats (micro_hardware.py).

Rows, columns and weights are quantised from the source, each for the product that reads it. The weight gradient reads
copies in blocks of rows of one expert; a dense layer is one expert.

R rows, P padded rows in B blocks of K, D inputs, N outputs, E experts.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from moefold.config.precision_recipes import RecipeSpec
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.product import ExpertRows, KeptOperand, Products, ends_of_rows
from moefold.kernels.quantise.row_blocks import RowBlocks, row_blocks
from moefold.layout.counter_random import GROUP, RandomCounters, random_counters
from moefold.layout.weight_copies import cached_copy
from moefold.precision.linear import PlacedWeight, RecipeTensors
from moefold.precision.micro_formats import MICRO_FORMATS, MicroFormat, MicroSource
from moefold.precision.micro_hardware import HardwareProducts
from moefold.precision.micro_products import MicroOperand, MicroProducts, MicroWeight, WeightMatrix


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
        if self.rounds_by_token and not in_whole_groups(self.numbers.column_N):
            raise ValueError(
                f"{name}: outputs on this rank do not lie in whole groups of {GROUP}, which share random numbers; set "
                f"precision.stochastic to false, or widths to multiples of {GROUP} times the ranks that share them"
            )
        has_format = kernels.facts.multiplies_micro_formats
        make_products = HardwareProducts if has_format else MicroProducts
        self.products: Products | None = make_products(self.format, kernels)

    @property
    def input_maker(self) -> object:
        return self

    def input(self, x: Tensor, rows: ExpertRows | None) -> MicroOperand:
        return self.quantise(x, rows, None)

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> MicroOperand:
        return self.quantise(dy, rows, number_R)

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

    def quantise(self, x: Tensor, rows_of: ExpertRows | None, number_R: Tensor | None) -> MicroOperand:
        """Both copies of rows (R, D)."""
        count = len(x)
        height = self.format.block
        if rows_of is None:
            ends_E, blocks = dense_row_blocks(count, height, x.device)
        else:
            ends_E = ends_of_rows(x, rows_of)
            blocks = row_blocks(ends_E, count, height)
        experts = len(ends_E)
        expert_R = blocks.expert_R
        draws = RowDraws()
        if number_R is not None:
            row_number_R = self.numbers.of_rows(number_R, expert_R)
            draws = self.draw(row_number_R, blocks)
        along_rows = MicroSource(x, expert_R, experts, draws.rows)
        rows = self.format.rows(along_rows)
        along_columns = MicroSource(x, blocks.expert_B, experts, draws.columns, blocks.source_P)
        columns = self.format.columns(along_columns)
        return MicroOperand(ends_E, blocks.ends_E, rows, columns)

    def draw(self, number_R: Tensor, blocks: RowBlocks) -> RowDraws:
        """By row and output; by the block's first row, output and place in the block."""
        device = number_R.device
        column_N = self.numbers.on_device(device)
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


@lru_cache(maxsize=8)
def dense_row_blocks(rows: int, height: int, device: torch.device) -> tuple[Tensor, RowBlocks]:
    """The end and the blocks of a dense layer's rows, which depend on their number alone: some thirty small kernels,
    once for all layers."""
    with torch.inference_mode(False):  # those made while generating are used in training too
        ends_1 = torch.full((1,), rows, dtype=torch.int32, device=device)
        return ends_1, row_blocks(ends_1, rows, height)


def first_of_blocks(number_R: Tensor, blocks: RowBlocks, height: int) -> Tensor:
    """The number of each block's first row."""
    padded = len(blocks.expert_B) * height
    number_P = number_R.new_zeros(padded + 1)
    number_P[blocks.place_R] = number_R
    return number_P[:padded:height]


def in_whole_groups(column_N: Tensor) -> bool:
    """Whether columns lie as kernels draw their numbers: in groups that follow one another from a multiple on."""
    if len(column_N) % GROUP:
        return False
    groups = column_N.view(-1, GROUP)
    firsts = groups[:, 0] // GROUP * GROUP
    expected = firsts[:, None] + torch.arange(GROUP)
    return torch.equal(groups, expected)


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

    def on_device(self, device: torch.device) -> Tensor:
        """`column_N`, uploaded once: a graph of the step takes nothing from the host."""
        if self.column_N.device != device:
            self.column_N = self.column_N.to(device)
        return self.column_N

    def of_rows(self, number_R: Tensor, expert_R: Tensor) -> Tensor:
        return number_R * self.experts + self.first_expert + expert_R
