"""A frozen base in blocks of few bits (QLoRA): weights are dequantised where a product reads them, a matrix at a time.

    hold_base(model, format, products, kernels)

Forward and data gradient both dequantise, and nothing of it is saved. Of routed experts, those that got rows are
dequantised some at a time, so that a buffer has at most `MOST_VALUES` values, or one matrix. Products read what the
blocks stand for, in the model's precision.

A block and its scale depend on the values of one row alone. What blocks stand for, quantised again, is the same: a
checkpoint has these values, as it has those of any weight, and a resumed run has the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.config.base_formats import WIDEST_SCALE, BaseFormat
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.frozen_weights import HeldWeights
from moefold.kernels.experts.grouped_gemm import grouped_gemm, rows_per_expert
from moefold.kernels.linear.linear import DENSE_PRODUCTS
from moefold.kernels.linear.product import ExpertRows, KeptOperand, Operand, Products
from moefold.kernels.quantise.base_codecs import CODECS, dequantise_rows, quantise_rows
from moefold.layout.declare import declared_parameters
from moefold.layout.gradient_sink import underlying_parameter
from moefold.layout.held_blocks import attach_held_blocks, blocks_to_read
from moefold.precision.linear import RecipeTensors
from moefold.precision.recipes import bind_fused_kernels, named_products, placed_weight

Dequantise = Callable[[Tensor, Tensor, str, int, torch.dtype], Tensor]
MOST_VALUES = 1 << 27  # of several experts, dequantised at a time


@dataclass(frozen=True)
class BaseBlocks:
    """Rows of a weight in blocks. `values` and `scales` have the weight's dims but the last."""

    format: BaseFormat
    values: Tensor
    scales: Tensor
    width: int
    dtype: torch.dtype  # of the weight

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], self.width

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return prod(self.shape)

    def __getitem__(self, window: tuple[slice, ...]) -> BaseBlocks:
        """A window of whole rows."""
        *rows, columns = window
        whole = range(self.width)
        assert whole[columns] == whole, f"columns {columns} of rows of {self.width} values; blocks are of whole rows"
        return self.select(tuple(rows))

    def select(self, rows: int | slice | tuple[slice, ...]) -> BaseBlocks:
        return replace(self, values=self.values[rows], scales=self.scales[rows])

    def unbind(self) -> Sequence[BaseBlocks]:
        return [self.select(i) for i in range(len(self.values))]

    def view(self, shape: Sequence[int]) -> BaseBlocks:
        """The same rows, counted by other dims."""
        *lead, width = shape
        assert width == self.width, f"rows of {self.width} values as rows of {width}"
        return self.remade(lambda stored: stored.view(*lead, stored.shape[-1]))

    def elements(self, window: slice) -> BaseBlocks:
        first = window.start // self.width
        last = window.stop // self.width
        found = self.select(slice(first, last))
        assert found.numel() == window.stop - window.start, f"{window} has no whole rows of {self.width} values"
        return found

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.values, self.scales

    def remade(self, make: Callable[[Tensor], Tensor]) -> BaseBlocks:
        values = make(self.values)
        scales = make(self.scales)
        return replace(self, values=values, scales=scales)

    def copy_(self, values: Tensor) -> None:
        rounded = values.to(self.values.device, self.dtype)
        rounded = rounded.expand(self.shape)
        quantised = quantise_rows(rounded, self.format.name)
        self.values.copy_(quantised.values)
        self.scales.copy_(quantised.scales)

    def dequantised(self, dequantise: Dequantise = dequantise_rows) -> Tensor:
        return dequantise(self.values, self.scales, self.format.name, self.width, self.dtype)


def empty_blocks(weight: Tensor, format: BaseFormat) -> BaseBlocks:
    """Blocks without values for a weight of this shape and dtype."""
    *rows, width = weight.shape
    blocks = format.blocks(width)
    row_bytes = blocks * format.block * format.bits // 8
    stored = CODECS[format.name].dtype
    values = weight.new_empty((*rows, row_bytes), dtype=stored)
    scale = torch.uint8
    if format.scale_bytes is None:  # a magnitude of the weight, which its own precision holds
        scale = weight.dtype if weight.itemsize == 2 else torch.float32
    of_scales = format.groups(width) * WIDEST_SCALE
    scales = weight.new_empty((*rows, blocks + of_scales), dtype=scale)
    return BaseBlocks(format, values, scales, width, weight.dtype)


class PlainRows(NamedTuple):
    """Rows of an input or a gradient as they are. `ends_E`: where each expert's end; None: of a dense layer."""

    rows: Tensor
    ends_E: Tensor | None


class BlockRecipe:
    """Products of plain rows with weights in blocks."""

    keeps: KeptOperand = "rows"
    row_multiple = 1
    rounds_by_token = False

    def __init__(self, format: BaseFormat, kernels: BoundKernels):
        self.name = format.name
        products = BlockProducts(kernels)
        self.products: Products | None = products
        self.dequantise = kernels[dequantise_rows]

    @property
    def input_maker(self) -> object:
        return self

    def input(self, x: Tensor, rows: ExpertRows | None) -> PlainRows:
        ends_E = None if rows is None else rows.ends_E
        return PlainRows(x, ends_E)

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> PlainRows:
        return self.input(dy, rows)

    def weight(self, w: Tensor) -> BaseBlocks:
        parameter = underlying_parameter(w)
        blocks = blocks_to_read(parameter)
        assert isinstance(blocks, BaseBlocks), "a weight of this recipe is held in blocks"
        return blocks.view(w.shape)

    def held_experts(self, weight: Tensor) -> HeldWeights:
        """For kernels that multiply all rows of some experts at a time."""
        blocks = self.weight(weight)
        experts = len(blocks.values)
        size = blocks.numel() // experts
        at_once = max(1, MOST_VALUES // size)
        parts = -(-experts // at_once)
        even = -(-experts // parts)

        def load(some: slice) -> Tensor:
            return blocks.select(some).dequantised(self.dequantise)

        return HeldWeights(blocks.shape, even, load)

    def state(self) -> RecipeTensors:
        return {}


class BlockProducts:
    """Forward and data gradient. `most`: values of several experts that are dequantised at a time."""

    def __init__(self, kernels: BoundKernels, most: int = MOST_VALUES):
        self.multiply_rows = kernels[grouped_gemm]
        self.dequantise = kernels[dequantise_rows]
        self.most = most

    def forward(self, x: PlainRows, w: BaseBlocks, bias: Tensor | None) -> Tensor:
        if x.ends_E is not None:
            return self.multiply_experts(x.rows, w, x.ends_E, is_data=False)
        return DENSE_PRODUCTS.forward(Operand(x.rows), Operand(w.dequantised(self.dequantise)), bias)

    def data(self, dy: PlainRows, w: BaseBlocks, into: Tensor | None) -> Tensor:
        if dy.ends_E is None:
            return DENSE_PRODUCTS.data(Operand(dy.rows), Operand(w.dequantised(self.dequantise)), into)
        dx_RD = self.multiply_experts(dy.rows, w, dy.ends_E, is_data=True)
        return dx_RD if into is None else into.add_(dx_RD)

    def weight(self, dy: PlainRows, x: PlainRows, weight: Tensor) -> Tensor | None:
        raise AssertionError("a base in blocks is frozen: its weights have no gradient")

    def multiply_experts(self, x: Tensor, w: BaseBlocks, ends_E: Tensor, is_data: bool) -> Tensor:
        """Rows (R, D) times the transposed matrices (E, N, D) of their experts; of gradients (R, N), times the matrices
        themselves. Rows behind the last end are zero."""
        _, outputs, inputs = w.shape
        width = inputs if is_data else outputs
        y = x.new_zeros(len(x), width)
        counts = rows_per_expert(ends_E)
        for experts, rows in expert_runs(counts, self.most // (outputs * inputs)):
            matrices = w.select(experts).dequantised(self.dequantise)
            left = x[rows].contiguous()
            right = matrices.mT if is_data else matrices
            ends = ends_E[experts] - rows.start
            y[rows] = self.multiply_rows(left, right, ends)
        return y


def expert_runs(counts: Sequence[int], most: int) -> Iterator[tuple[slice, slice]]:
    """Neighbouring experts with rows, at most so many at a time (one at least), and their rows."""
    first = 0
    start = 0
    end = 0
    for expert, count in enumerate([*counts, 0]):
        is_full = expert - first >= max(most, 1)
        if count == 0 or is_full:
            if end > start:
                yield slice(first, expert), slice(start, end)
            first = expert if count else expert + 1
            start = end
        end += count


@torch.no_grad()
def hold_base(model: nn.Module, format: BaseFormat, products: Iterable[str], kernels: BoundKernels) -> None:
    """Let blocks stand for the weights of these products. The model was declared without memory, and blocks have none
    either; products of other pipeline ranks are left."""
    recipe = BlockRecipe(format, kernels)
    here = named_products(model)
    held: set[int] = set()  # by the identity of weights' declarations
    for name in products:
        if name in here:
            product = here[name]
            product.use_recipe(recipe, kernels)
            weight = placed_weight(product)
            held.add(id(weight.declaration))
    for parameter in declared_parameters(model):
        if id(parameter.declaration) not in held:
            continue
        tensor = parameter.tensor
        blocks = empty_blocks(tensor, format)
        for stored in blocks.tensors():
            memory = stored.untyped_storage()
            memory.resize_(0)
        attach_held_blocks(tensor, blocks)
        nothing = tensor.new_full((1,), torch.nan)  # which a loss would show
        tensor.data = nothing.expand(tensor.shape)
    bind_fused_kernels(model)
