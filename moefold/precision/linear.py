"""Linear layers, dense and grouped: the modules that a precision recipe is attached to (precision/recipes.py).

The model's classes create them; `use_recipe` sets the number format of their operands and the kernels for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.linear import GroupedGemms, Recipes, grouped_linear, linear
from moefold.kernels.linear.low_rank_matrices import LowRankMatrices
from moefold.kernels.linear.product import PLAIN, Adapter, Recipe, WeightAndBias
from moefold.layout.axes import World
from moefold.layout.declare import Declaration, DeclaringModule, PartOfTensor, RowMeaning
from moefold.layout.placement import REPLICATED, Placement

RecipeTensors = dict[str, Tensor | PartOfTensor]  # by name: what outlives a step
Layers = Sequence[WeightAndBias]
Outputs = tuple[Tensor, ...]
MultiplyLayers = Callable[[Tensor, Layers, Recipes, Sequence[Adapter]], Outputs]
AnyFunction = Callable[..., Any]


class PlacedWeight(NamedTuple):
    """The declaration of a product's weight, and the ranks that it is placed on."""

    declaration: Declaration
    world: World


class DenseAdapter(Protocol):
    """An adapter beside a layer's weight: its output, and its matrices for a product that adds it inside."""

    @property
    def matrices(self) -> LowRankMatrices: ...

    def __call__(self, x: Tensor) -> Tensor: ...


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
        rows: RowMeaning = "outputs",
    ):
        super().__init__(world)
        shape = (*outputs, inputs)
        self.weight = self.declare_parameter("weight", *shape, std=std, placement=placement, rows=rows)
        input_dim = len(outputs)
        gives_summand = placement.sharded_dims == (input_dim,)
        tp = world.axis("tp")
        self.bias_factor = 1.0
        if gives_summand and tp.index > 0:
            self.bias_factor = 0.0
        self.bias = None
        if bias:
            bias_placement = REPLICATED if gives_summand else placement
            self.bias = self.declare_parameter("bias", *outputs, std=0.0, placement=bias_placement)
        self.recipe: Recipe = PLAIN
        self.multiply_layers: MultiplyLayers = linear.reference
        self.lora: DenseAdapter | None = None  # beside the weight (precision/low_rank.py)
        self.rescale: Callable[[Tensor, Tensor], Tensor] | None = None  # of both outputs, for the adapter (DoRA)
        self.drops_inputs = False  # in the adapter, by token

    @property
    def placed_weight(self) -> PlacedWeight:
        declaration = self.declared["weight"]
        return PlacedWeight(declaration, self.world)

    def parameters_read(self) -> Iterator[nn.Parameter]:
        """The adapter's too, whose matrices a product reads without a call of the adapter."""
        return self.parameters()

    def use_recipe(self, recipe: Recipe, kernels: BoundKernels) -> None:
        bound = kernels.with_facts(recipe=recipe.name)
        self.recipe = recipe
        self.multiply_layers = bound[linear]

    def forward(self, x: Tensor, multiply: MultiplyLayers | None = None) -> Tensor:
        """`multiply`: instead of the layer's own product."""
        multiply = multiply or self.multiply_layers
        layers = [self.weight_and_bias()]
        (y,) = multiply(x, layers, self.recipe, [self.adapter])
        return self.finish(x, y)

    @property
    def adds_inside(self) -> bool:
        """Whether the product of the weight adds the output of the adapter: it reads the same input, and the sum is
        all."""
        return self.lora is not None and not self.drops_inputs and self.rescale is None

    @property
    def adapter(self) -> Adapter:
        """The matrices that the product of the weight adds; None: it adds nothing."""
        if self.lora is None or not self.adds_inside:
            return None
        a, b, scale = self.lora.matrices
        return a, b.flatten(0, -2), scale

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """The output of this layer, from the product of its weight: the adapter's is added, unless it was inside."""
        output = self.unflatten_outputs(y)
        if self.lora is None or self.adds_inside:
            return output
        if self.rescale is None:
            return output + self.lora(x)
        return self.rescale(output, self.lora(x))

    def weight_and_bias(self) -> WeightAndBias:
        """As matrix and vector."""
        weight = self.weight.flatten(0, -2)
        if self.bias is None:
            return weight, None
        bias = self.bias.flatten()
        return weight, bias * self.bias_factor

    def unflatten_outputs(self, y: Tensor) -> Tensor:
        """Outputs of several sizes; of the first, heads for example, a product may give a share."""
        _, *inner, _ = self.weight.shape
        return y.unflatten(-1, (-1, *inner))


class LinearGroup(DeclaringModule):
    """Linear layers that read the same input, called as one op, which may sum their input gradients in its products.
    The layers stay members of the module that made them and keep their names."""

    def __init__(self, world: World, *layers: Linear):
        super().__init__(world)
        self.layers = layers  # a tuple, so that torch does not register them here

    def parameters_read(self) -> Iterator[nn.Parameter]:
        for layer in self.layers:
            yield from layer.parameters_read()

    @property
    def share_input(self) -> bool:
        """Whether all layers read the same operand."""
        makers = [layer.recipe.input_maker for layer in self.layers]
        return all(maker is makers[0] for maker in makers)

    def forward(self, x: Tensor, multiply: MultiplyLayers | None = None) -> list[Tensor]:
        layers = self.layers
        first = layers[0]
        if not self.share_input:
            return [layer(x, multiply) for layer in layers]
        multiply = multiply or first.multiply_layers
        recipes = [layer.recipe for layer in layers]
        is_one = all(recipe is recipes[0] for recipe in recipes)
        weights_and_biases = [layer.weight_and_bias() for layer in layers]
        adapters = [layer.adapter for layer in layers]
        flat_outputs = multiply(x, weights_and_biases, recipes[0] if is_one else recipes, adapters)
        outputs: list[Tensor] = []
        for layer, y in zip(layers, flat_outputs, strict=True):
            output = layer.finish(x, y)
            outputs.append(output)
        return outputs


class TpProjections(Protocol):
    """Projections of tensor-parallel ranks: rows of all ranks before one, sums over ranks behind one. `around`: a
    memory region, called around the rows that are gathered, or around the product."""

    def gather(self, h_TD: Tensor, layers: nn.Module, around: AnyFunction) -> Any:
        """What a call of the layers gives for the rows of all ranks."""
        ...

    def scatter(self, x_CN: Tensor, layer: Linear, around: AnyFunction) -> Tensor:
        """This rank's rows of the sum over ranks of what the layer gives."""
        ...

    def require_peers(self) -> None:
        """Fail if a signal of another rank did not come, as far as the host knows without a wait."""
        ...


class ProjectionsByCollectives:
    """Collectives before and behind whole products."""

    def __init__(self, gather_rows: Callable[[Tensor], Tensor], scatter_sums: Callable[[Tensor], Tensor]):
        self.gather_rows = gather_rows
        self.scatter_sums = scatter_sums

    def gather(self, h_TD: Tensor, layers: nn.Module, around: AnyFunction) -> Any:
        h_CD = around(self.gather_rows, h_TD)
        return layers(h_CD)

    def scatter(self, x_CN: Tensor, layer: Linear, around: AnyFunction) -> Tensor:
        summand_CD = around(layer, x_CN)
        return self.scatter_sums(summand_CD)

    def require_peers(self) -> None:
        """Collectives fail by themselves."""


@runtime_checkable
class FusesProducts(Protocol):
    """A module whose kernel computes several products at once, so that the kernel depends on all their recipes."""

    def bind_fused_kernel(self) -> None:
        """Choose the kernel; called once the products have their recipes."""
        ...


class GroupedAdapter(Protocol):
    """Adapters of all experts beside a grouped product: their output, and their matrices for a kernel that adds it
    inside the product."""

    @property
    def matrices(self) -> LowRankMatrices: ...

    def __call__(self, x_RD: Tensor, ends_e: Tensor) -> Tensor: ...


class GroupedLinear(nn.Module):
    """One linear layer per expert: rows sorted by expert, (R, D) to (R, ...). The weight (e, ..., D) is a parameter of
    the calling module and is passed in, so that the parameter's name does not depend on this class. `reads_tokens`:
    its rows are gathered tokens. `placed_weight`: where the weight lies, for a recipe that keeps state by expert."""

    def __init__(self, kernels: BoundKernels, reads_tokens: bool = False, placed_weight: PlacedWeight | None = None):
        super().__init__()
        self.reads_tokens = reads_tokens
        self.placed_weight = placed_weight
        self.lora: GroupedAdapter | None = None
        self.drops_inputs = False
        self.use_recipe(PLAIN, kernels)

    def use_recipe(self, recipe: Recipe, kernels: BoundKernels) -> None:
        bound = kernels.with_facts(recipe=recipe.name)
        self.recipe = recipe
        self.multiply_rows = bound[grouped_linear]
        multiply = bound[grouped_gemm]
        multiply_for_weight = bound[grouped_gemm_weight]
        self.gemms = GroupedGemms(multiply, multiply_for_weight)

    @property
    def adapter(self) -> LowRankMatrices | None:
        return None if self.lora is None else self.lora.matrices

    def forward(self, x_RD: Tensor, weight: Tensor, ends_e: Tensor) -> Tensor:
        w_eND = weight.flatten(1, -2)
        y_RN = self.multiply_rows(x_RD, w_eND, ends_e, self.recipe, self.gemms, self.reads_tokens)
        outputs = weight.shape[1:-1]
        y = y_RN.unflatten(-1, outputs)
        if self.lora is None:
            return y
        return y + self.lora(x_RD, ends_e)


def product_draws_by_token(product: Linear | GroupedLinear) -> bool:
    """Whether a product, or its adapter, draws random numbers that depend on the numbers of its rows' tokens."""
    return product.drops_inputs or product.recipe.rounds_by_token


def draws_by_token(module: nn.Module) -> bool:
    """Whether a product inside draws by token."""
    products = [part for part in module.modules() if isinstance(part, Linear | GroupedLinear)]
    return any(map(product_draws_by_token, products))
