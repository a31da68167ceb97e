"""The linear products of a model by name, and the recipe of each. Torch-free.

A product's name is that of its module: `blocks.0.attention.query`, `blocks.0.moe.experts.up_product`. The default
scope of `precision.recipe` is attention, dense MLPs, shared and routed experts. Embedding, head and router are no
products of a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from moefold.anatomy.step_specs import WeightSpec, prefixed_steps
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.precision_recipes import RECIPE_SPECS, WIDTH_MULTIPLE, last_plain_layers, parse_recipe_entries
from moefold.config.run import Config, ModelConfig, ParallelConfig, PrecisionConfig

ROUTER_WEIGHT = "moe.router.weight"
NO_PRODUCTS = ("embedding.weight", "head.weight", ROUTER_WEIGHT)
GROUPED_PRODUCTS = {
    "moe.experts.gate_up": "moe.experts.up_product",
    "moe.experts.up": "moe.experts.up_product",
    "moe.experts.down": "moe.experts.down_product",
}
SCOPE = ("attention.", "dense.", "moe.shared.", "moe.experts.")
PLAIN_IN_SCOPE = ("moe.shared.gate",)  # one output


@dataclass(frozen=True)
class ProductSpec:
    """One linear product: `place` is its name inside its layer, `prefix` that of the layer. `inputs` and `outputs` are
    the widths on one rank."""

    prefix: str
    place: str
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        return self.prefix + self.place

    @property
    def layer(self) -> int | None:
        """The number of the model's layer; None in a layer of multi-token prediction."""
        if not self.prefix.startswith("blocks."):
            return None
        _, number, *_ = self.prefix.split(".")
        return int(number)

    @property
    def is_in_scope(self) -> bool:
        return place_is_in_scope(self.place)


@dataclass(frozen=True)
class ProductRecipe:
    """The recipe of a product, and why it has this one."""

    product: ProductSpec
    recipe: str
    why: str


def model_products(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ProductSpec]:
    """Every linear product from tokens to the loss, layers of multi-token prediction included."""
    degrees = {"tp": parallel.tp, "ep": parallel.ep, "etp": parallel.etp}
    for prefix, weight in product_weights(model):
        yield product_of_weight(prefix, weight, degrees)


def product_weights(model: ModelConfig) -> Iterator[tuple[str, WeightSpec]]:
    """The weight of every linear product, with the prefix of its layer."""
    for prefix, step in prefixed_steps(model):
        for weight in step.weights:
            if is_product_weight(weight):
                yield prefix, weight


def is_product_weight(weight: WeightSpec) -> bool:
    return weight.is_matrix and weight.name not in NO_PRODUCTS


def adaptable_weights(model: ModelConfig) -> Iterator[tuple[str, WeightSpec]]:
    """The weights that may have an adapter: those of linear products, and routers."""
    yield from product_weights(model)
    for prefix, step in prefixed_steps(model):
        for weight in step.weights:
            if weight.name == ROUTER_WEIGHT:
                yield prefix, weight


def weights_in_scope(model: ModelConfig) -> set[str]:
    """The names of the weights that the default scope of `precision.recipe` quantises."""
    weights = product_weights(model)
    return {prefix + weight.name for prefix, weight in weights if is_in_scope(weight)}


def is_in_scope(weight: WeightSpec) -> bool:
    """Whether the default scope has the product of a weight."""
    return is_product_weight(weight) and place_is_in_scope(product_place(weight.name))


def place_is_in_scope(place: str) -> bool:
    return place.startswith(SCOPE) and place not in PLAIN_IN_SCOPE


def product_of_weight(prefix: str, weight: WeightSpec, degrees: dict[str, int]) -> ProductSpec:
    *outputs, inputs = weight.part(degrees)
    if weight.name in GROUPED_PRODUCTS:
        outputs = outputs[1:]  # those of one expert
    place = product_place(weight.name)
    width = prod(outputs)
    return ProductSpec(prefix, place, int(inputs), int(width))


def product_place(weight: str) -> str:
    """The name, inside its layer, of the product of the weight with this name."""
    return GROUPED_PRODUCTS.get(weight) or weight.removesuffix(".weight")


def product_recipes(config: Config) -> list[ProductRecipe]:
    """The recipe of every product. Entries that match no product, and widths that FP8 kernels cannot read, are refused
    all at once."""
    products = list(model_products(config.model, config.parallel))
    layers = config.model.layers
    chosen, problems = choose_recipes(products, config.precision, layers)
    problems += filter(None, map(width_problem, chosen))
    if problems:
        raise UserError(*problems)
    return chosen


def choose_recipes(
    products: list[ProductSpec], precision: PrecisionConfig, layers: int
) -> tuple[list[ProductRecipe], list[str]]:
    """The recipe of each product of a model with so many layers, and a problem for each entry that matches none."""
    chosen = [default_recipe(product, precision, layers) for product in products]
    problems: list[str] = []
    for entry in parse_recipe_entries(precision.recipes):
        matches = False
        for i, product in enumerate(products):
            if entry.matches(product.name):
                why = f"precision.recipes: {entry.pattern}"
                chosen[i] = ProductRecipe(product, entry.recipe, why)
                matches = True
        if not matches:
            problem = unmatched_pattern("precision.recipes", entry.pattern, products)
            problems.append(problem)
    return chosen, problems


def default_recipe(product: ProductSpec, precision: PrecisionConfig, layers: int) -> ProductRecipe:
    if not product.is_in_scope:
        return ProductRecipe(product, "plain", "outside the scope of precision.recipe")
    layer = product.layer
    if layer is not None:
        last = last_plain_layers(precision.recipe, precision.exclude_last, layers)
        if layer < precision.exclude_first:
            return ProductRecipe(product, "plain", "precision.exclude_first")
        if layer >= layers - last:
            return ProductRecipe(product, "plain", "precision.exclude_last")
    return ProductRecipe(product, precision.recipe, "precision.recipe")


def unmatched_pattern(key: str, pattern: str, products: list[ProductSpec]) -> str:
    """The problem of a pattern of a configuration key that matches no product."""
    names = [product.name for product in products]
    near = did_you_mean(pattern, names)
    shown = printable_text(pattern)
    return f'{key}: no product of the model matches "{shown}"{near}; * stands for any part of a name'


def width_problem(chosen: ProductRecipe) -> str | None:
    product = chosen.product
    recipe = RECIPE_SPECS[chosen.recipe]
    sizes = product.inputs, product.outputs
    fits = all(size % WIDTH_MULTIPLE == 0 for size in sizes)
    if fits or not recipe.quantises:
        return None
    widths = f"{product.inputs} inputs and {product.outputs} outputs on a rank"
    advice = f'add "{product.name}: plain" to precision.recipes'
    return f"{product.name} has {widths}; {chosen.recipe} needs multiples of {WIDTH_MULTIPLE}; {advice}"
