"""Low-rank adapters beside linear products (LoRA): y = W x + s B (A x). The sum W + s B A is never in memory.

    attach_adapters(model, specs, kernels)

B starts at zero, A as weights do: drawn by name and seed, whatever the layout. A is cut over ranks as the weight's
inputs are, B as its outputs are; of the two, the other is whole on every rank and gets its gradient as a sum of
summands. The product of the weight keeps its recipe and its kernels; products with A and B are plain.

With dropout, x of A is x times a mask of zeros and 1 / (1 - share). The mask is a function of the token's number in the
run, the product and the input, so it is the same on any layout and when a forward is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import gcd, prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from moefold.anatomy.adapters import AdapterSpec, is_router
from moefold.comm.collectives import all_reduce_no_grad
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.linear import linear
from moefold.kernels.linear.low_rank_matrices import LowRankMatrices
from moefold.kernels.linear.product import PLAIN
from moefold.kernels.quantise.base_codecs import dequantise_rows
from moefold.layout.counter_random import LOW_32, random_32
from moefold.layout.declare import Declaration, DeclaringModule
from moefold.layout.held_blocks import blocks_to_read
from moefold.layout.held_share import held_share_of
from moefold.layout.placement import Placement
from moefold.layout.token_numbers import numbers_of_rows
from moefold.precision.base_blocks import BaseBlocks
from moefold.precision.linear import GroupedLinear, Linear, PlacedWeight
from moefold.precision.recipes import bind_fused_kernels, named_products, placed_weight


class LowRankPair(DeclaringModule):
    """The parameters of an adapter: `a` (..., rank, inputs) and `b` (..., outputs, rank), with the stack of experts and
    the placement of the weight that they stand beside."""

    def __init__(self, weight: PlacedWeight, spec: AdapterSpec):
        super().__init__(weight.world)
        declaration = weight.declaration
        rank = spec.rank
        self.scale = spec.scale
        self.dropout = spec.dropout
        self.stream = crc32(f"dropout {spec.product.name}".encode())
        stacked = declaration.stacked
        *outputs, inputs = declaration.shape
        experts = outputs[:stacked]
        # As wide as PEFT draws it: uniform within 1 / sqrt(inputs).
        std = (3 * inputs) ** -0.5
        rank_dim = len(experts)
        placement = placement_of_a(declaration, rank_dim + 1)
        self.a = self.declare_parameter("a", *experts, rank, inputs, placement=placement, std=std, stacked=stacked)
        placement = placement_of_b(declaration)
        self.b = self.declare_parameter("b", *outputs, rank, placement=placement, std=0.0, stacked=stacked)
        axes = [weight.world.axis(axis) for dim, axis in declaration.placement.cut if dim == len(outputs)]
        parts = [axis.index * self.a.shape[-1] for axis in axes]
        self.first_input = sum(parts)  # of this rank's part of A

    @property
    def matrices(self) -> LowRankMatrices:
        return LowRankMatrices(self.a, self.b, self.scale)

    def drop_inputs(self, x: Tensor) -> Tensor:
        """In training, x with a share of its values zero and the others divided by the share that is left."""
        if not self.dropout or not self.training:
            return x
        *rows, inputs = x.shape
        number_R = numbers_of_rows(prod(rows), x.device)
        column_C = torch.arange(self.first_input, self.first_input + inputs, device=x.device)
        drawn_RC = random_32(number_R, self.stream, column_C)
        is_kept_RC = drawn_RC >= self.dropout * (LOW_32 + 1)
        mask_RC = is_kept_RC.to(x.dtype) / (1 - self.dropout)
        return x * mask_RC.view_as(x)


def placement_of_a(weight: Declaration, input_dim: int) -> Placement:
    """Experts are cut as the weight's, the last dim as its inputs."""
    last = len(weight.shape) - 1
    cut: list[tuple[int, str]] = []
    for dim, axis in weight.placement.cut:
        is_expert_dim = weight.stacked and dim == 0
        if is_expert_dim:
            cut.append((dim, axis))
        elif dim == last:
            cut.append((input_dim, axis))
    return Placement(weight.placement.grid, tuple(cut))


def placement_of_b(weight: Declaration) -> Placement:
    """All dims but the last are cut as the weight's."""
    last = len(weight.shape) - 1
    cut = [(dim, axis) for dim, axis in weight.placement.cut if dim != last]
    return Placement(weight.placement.grid, tuple(cut))


class LowRank(LowRankPair):
    """The adapter of a linear layer."""

    def __init__(self, weight: PlacedWeight, spec: AdapterSpec, kernels: BoundKernels):
        super().__init__(weight, spec)
        plain = kernels.with_facts(recipe=PLAIN.name)
        self.multiply_layers = plain[linear]

    def forward(self, x: Tensor) -> Tensor:
        low = self.multiply(self.drop_inputs(x), self.a)
        b = self.b.flatten(0, -2)
        y = self.multiply(low * self.scale, b)
        outputs = self.b.shape[:-1]
        return y.unflatten(-1, outputs)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        layer = (weight, None)
        (y,) = self.multiply_layers(x, [layer], PLAIN)
        return y


class DirectedLowRank(LowRank):
    """The adapter of a linear layer whose rows have a trained magnitude (DoRA): y = m (W + s B A) x / |W + s B A|, with
    the length of each row. Lengths have no gradient, as in the paper (https://arxiv.org/abs/2402.09353) and in PEFT.
    Dropout is of the inputs of A, as without magnitudes."""

    def __init__(self, layer: Linear, spec: AdapterSpec, kernels: BoundKernels):
        super().__init__(layer.placed_weight, spec, kernels)
        self.dequantise = kernels[dequantise_rows]
        self.layers = (layer,)  # a tuple, so that torch does not register it here
        self.borrowed = (layer.weight,)
        declaration = layer.placed_weight.declaration
        *outputs, _ = declaration.shape
        placement = placement_of_b(declaration)
        self.magnitude = self.declare_parameter("magnitude", *outputs, placement=placement, std=0.0)
        last = len(outputs)
        self.axes = [self.world.axis(axis) for dim, axis in declaration.placement.cut if dim == last]

    @torch.no_grad()
    def row_lengths(self) -> Tensor:
        """|W + s B A| of every row, without the sum: its square is W W + 2 s (W A^T) B + s^2 (B A A^T) B, summed over
        the ranks that share out the inputs."""
        weight = self.weight_read()
        wide = torch.promote_types(weight.dtype, torch.float32)
        own = torch.linalg.vector_norm(weight, dim=-1, dtype=wide).square()
        a = self.a.to(wide)
        b = self.b.to(wide)
        low = (weight @ self.a.mT).to(wide) * 2 + self.scale * (b @ (a @ a.mT))
        squares = own + self.scale * (low * b).sum(-1)
        for axis in self.axes:
            all_reduce_no_grad(squares, axis)
        return squares.clamp_min(0).sqrt()

    def weight_read(self) -> Tensor:
        """The weight that the layer's product reads: of a base in blocks, what these stand for."""
        (layer,) = self.layers
        weight = layer.weight
        blocks = blocks_to_read(weight)
        if isinstance(blocks, BaseBlocks):
            return blocks.dequantised(self.dequantise)
        return weight

    @torch.no_grad()
    def start_magnitude(self) -> None:
        """The lengths as they are: the layer computes what it did without the adapter, while B is zero."""
        lengths = self.row_lengths()
        share = held_share_of(self.magnitude)
        if share is None:
            self.magnitude.copy_(lengths)
            return
        last = share.first + share.values.numel()
        share.values.copy_(lengths.flatten()[share.first : last])

    def rescale(self, output: Tensor, change: Tensor) -> Tensor:
        """The layer's output, from that of its weight, bias included, and that of B A."""
        (layer,) = self.layers
        factor = self.magnitude / self.row_lengths().to(self.magnitude.dtype)
        if layer.bias is None:
            return (output + change) * factor
        bias = layer.bias * layer.bias_factor
        return (output - bias + change) * factor + bias


class GroupedLowRank(LowRankPair):
    """The adapters of all experts: one grouped product each with A and B, or the matrices of a fused kernel."""

    def __init__(self, weight: PlacedWeight, spec: AdapterSpec, kernels: BoundKernels):
        super().__init__(weight, spec)
        # Kernels ask whether rows of all widths begin at multiples of some bytes: those of the rank do if the common
        # divisor's do.
        width = gcd(kernels.facts.ffn, spec.rank)
        narrow = kernels.with_facts(ffn=width)
        first = GroupedLinear(narrow)
        second = GroupedLinear(narrow)
        self.products = (first, second)  # a tuple, so that torch does not register them: they have no recipe

    def forward(self, x_RD: Tensor, ends_e: Tensor) -> Tensor:
        first, second = self.products
        low_RK = first(self.drop_inputs(x_RD), self.a, ends_e)
        return second(low_RK * self.scale, self.b, ends_e)


def attach_adapters(model: nn.Module, specs: Iterable[AdapterSpec], kernels: BoundKernels) -> None:
    """Give products their adapters and freeze everything else; without a spec nothing changes. Specs of products on
    other pipeline ranks are left."""
    adapters = list(specs)
    if not adapters:
        return
    products = named_products(model)
    modules = dict(model.named_modules())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for spec in adapters:
        if is_router(spec.product):
            add_to_router(modules.get(spec.product.name), spec, kernels)
            continue
        product = products.get(spec.product.name)
        if product is None:
            continue
        weight = placed_weight(product)
        if isinstance(product, Linear) and spec.has_magnitude:
            adapter = DirectedLowRank(product, spec, kernels)
            product.lora = adapter
            product.rescale = adapter.rescale
        elif isinstance(product, Linear):
            product.lora = LowRank(weight, spec, kernels)
        else:
            product.lora = GroupedLowRank(weight, spec, kernels)
        product.drops_inputs = spec.dropout > 0
    bind_fused_kernels(model)


def add_to_router(router: nn.Module | None, spec: AdapterSpec, kernels: BoundKernels) -> None:
    """Give a router its adapter; None: it is on another pipeline rank."""
    if router is None:
        return
    assert isinstance(router, DeclaringModule)
    weight = PlacedWeight(router.declared["weight"], router.world)
    router.lora = LowRank(weight, spec, kernels)


def start_magnitudes(model: nn.Module, bring_weights: Callable[[str], None] | None = None) -> None:
    """Magnitudes of adapters as the rows of their weights are long; on all ranks that share a weight out.
    `bring_weights` is called before, with the name of an adapter whose layer has no weights here."""
    for name, module in model.named_modules():
        if not isinstance(module, DirectedLowRank):
            continue
        if bring_weights is not None:
            bring_weights(name)
        module.start_magnitude()


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it is without its adapters: its frozen base."""
    held: list[tuple[Any, Any]] = [(module, module.lora) for module in model.modules() if hasattr(module, "lora")]
    for product, _ in held:
        product.lora = None
    try:
        yield
    finally:
        for product, adapter in held:
            product.lora = adapter
