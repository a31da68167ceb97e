"""Linear layers, dense and grouped: the modules that a precision recipe is attached to (precision/recipes.py).

The model's classes create them; `use_recipe` sets the number format of their operands and the kernels for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.linear import GroupedGemms, grouped_linear, linear
from moefold.kernels.linear.product import PLAIN, Recipe, WeightAndBias
from moefold.layout.axes import World
from moefold.layout.declare import Declaration, DeclaringModule
from moefold.layout.placement import REPLICATED, Placement

MultiplyLayers = Callable[[Tensor, Sequence[WeightAndBias], Recipe], tuple[Tensor, ...]]


class PlacedWeight(NamedTuple):
    """The declaration of a product's weight, and the ranks that it is placed on."""

    declaration: Declaration
    world: World


class Linear(DeclaringModule):
    """y = x W^T + b. With `outputs` of several sizes, such as (2, F), the result has them as its last dims.

    Sharded over tp along an output dim, each rank computes its part of y, bias included. Sharded along the inputs (the
    last dim), each rank computes a summand of y; the first rank adds the whole bias, so that the sum holds it once.
    """

    def __init__(
        self,
        world: World,
        inputs: int,
        *outputs: int,
        bias: bool = False,
        std: float,
        placement: Placement = REPLICATED,
    ):
        super().__init__(world)
        self.weight = self.declare_parameter("weight", *outputs, inputs, std=std, placement=placement)
        gives_summand = placement.sharded_dims == (len(outputs),)
        adds_bias = not gives_summand or world.axis("tp").index == 0
        self.bias_factor = 1.0 if adds_bias else 0.0
        self.bias = None
        if bias:
            bias_placement = REPLICATED if gives_summand else placement
            self.bias = self.declare_parameter("bias", *outputs, std=0.0, placement=bias_placement)
        self.recipe: Recipe = PLAIN
        self.multiply_layers: MultiplyLayers = linear.reference

    @property
    def placed_weight(self) -> PlacedWeight:
        return PlacedWeight(self.declared["weight"], self.world)

    def use_recipe(self, recipe: Recipe, kernels: BoundKernels) -> None:
        self.recipe = recipe
        self.multiply_layers = kernels.with_facts(recipe=recipe.name)[linear]

    def forward(self, x: Tensor) -> Tensor:
        layer = self.weight_and_bias()
        (y,) = self.multiply_layers(x, [layer], self.recipe)
        return self.unflatten_outputs(y)

    def weight_and_bias(self) -> WeightAndBias:
        """As matrix and vector."""
        weight = self.weight.flatten(0, -2)
        if self.bias is None:
            return weight, None
        bias = self.bias.flatten() * self.bias_factor
        return weight, bias

    def unflatten_outputs(self, y: Tensor) -> Tensor:
        outputs = self.weight.shape[:-1]
        return y.unflatten(-1, outputs)


class LinearGroup(DeclaringModule):
    """Linear layers that read the same input, called as one op, which may sum their input gradients in its products.
    The layers stay members of the module that made them and keep their names."""

    def __init__(self, world: World, *layers: Linear):
        super().__init__(world)
        self.layers = layers  # a tuple, so that torch does not register them here
        self.borrowed = tuple(parameter for layer in layers for parameter in layer.parameters())

    @property
    def share_recipe(self) -> bool:
        recipe = self.layers[0].recipe
        return all(layer.recipe is recipe for layer in self.layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        layers = self.layers
        recipe = layers[0].recipe
        if not self.share_recipe:
            return [layer(x) for layer in layers]  # each recipe has its own operand of the input
        weights_and_biases = [layer.weight_and_bias() for layer in layers]
        multiply_layers = layers[0].multiply_layers
        outputs = multiply_layers(x, weights_and_biases, recipe)
        return [layer.unflatten_outputs(y) for layer, y in zip(layers, outputs, strict=True)]


@runtime_checkable
class FusesProducts(Protocol):
    """A module whose kernel computes several products at once, so that the kernel depends on all their recipes."""

    def bind_fused_kernel(self) -> None:
        """Choose the kernel; called once the products have their recipes."""
        ...


class GroupedLinear(nn.Module):
    """One linear layer per expert: rows sorted by expert, (R, D) to (R, ...). The weight (e, ..., D) is a parameter of
    the calling module and is passed in, so that the parameter's name does not depend on this class. `reads_tokens`:
    its rows are gathered tokens. `placed_weight`: where the weight lies, for a recipe that keeps state by expert."""

    def __init__(self, kernels: BoundKernels, reads_tokens: bool = False, placed_weight: PlacedWeight | None = None):
        super().__init__()
        self.reads_tokens = reads_tokens
        self.placed_weight = placed_weight
        self.use_recipe(PLAIN, kernels)

    def use_recipe(self, recipe: Recipe, kernels: BoundKernels) -> None:
        bound = kernels.with_facts(recipe=recipe.name)
        self.recipe = recipe
        self.multiply_rows = bound[grouped_linear]
        self.gemms = GroupedGemms(bound[grouped_gemm], bound[grouped_gemm_weight])

    def forward(self, x_RD: Tensor, weight: Tensor, ends_e: Tensor) -> Tensor:
        w_eND = weight.flatten(1, -2)
        y_RN = self.multiply_rows(x_RD, w_eND, ends_e, self.recipe, self.gemms, self.reads_tokens)
        outputs = weight.shape[1:-1]
        return y_RN.unflatten(-1, outputs)
