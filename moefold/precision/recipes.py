"""Precision recipes by name, and their attachment to a model's products by name pattern.

    attach_recipes(model, {"blocks.*.experts.*": "fp8_block", "blocks.*.attention.*": "plain"}, kernels)

A product is a `Linear` or a `GroupedLinear`; its name is its path in the model. A recipe maker gets the kernels and
the options of the section `precision`, and returns a function from a product to its recipe: stateless recipes are one
object for all products, a recipe with state is made for each product. Layers that read one input are multiplied
together where they share a recipe object.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from moefold.config.errors import UserError, did_you_mean, one_of
from moefold.config.precision_recipes import RECIPE_SPECS, RecipeSpec
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.product import PLAIN, Recipe
from moefold.kernels.quantise.quantise_weight import WeightFormat
from moefold.layout.declare import PartOfTensor, declared_parameters
from moefold.precision.delayed import DelayedFp8Recipe
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.linear import FusesProducts, GroupedLinear, Linear, PlacedWeight
from moefold.precision.microscaling import MicroscalingRecipe

Product = Linear | GroupedLinear
RecipeOfProduct = Callable[[str, Product], Recipe]  # of a product and its name
RecipeMaker = Callable[[BoundKernels, PrecisionConfig], RecipeOfProduct]
DEFAULT_OPTIONS = PrecisionConfig()


def make_recipe(spec: RecipeSpec, kernels: BoundKernels, options: PrecisionConfig) -> RecipeOfProduct:
    """The recipe that the table describes: one object for all products, or one for each where scales are delayed or
    rounding depends on the product."""
    if spec.is_emulated:
        return partial(make_microscaling_recipe, spec, kernels, options)
    if options.scaling == "delayed" and spec.scales_in_epilogue:
        return partial(make_delayed_recipe, spec, kernels, options)
    recipe = Fp8Recipe(spec, options, kernels) if spec.quantises else PLAIN

    def shared_recipe(_name: str, _product: Product) -> Recipe:
        return recipe

    return shared_recipe


def make_microscaling_recipe(
    spec: RecipeSpec, kernels: BoundKernels, options: PrecisionConfig, name: str, product: Product
) -> Recipe:
    return MicroscalingRecipe(spec, options, kernels, name, placed_weight(product))


def placed_weight(product: Product) -> PlacedWeight:
    weight = product.placed_weight
    assert weight is not None, "the weight's placement tells which experts and outputs a rank holds"
    return weight


def make_delayed_recipe(
    spec: RecipeSpec, kernels: BoundKernels, options: PrecisionConfig, _name: str, product: Product
) -> Recipe:
    weight = placed_weight(product)
    reads_tokens = isinstance(product, GroupedLinear) and product.reads_tokens
    return DelayedFp8Recipe(spec, options, kernels, weight, reads_tokens)


RECIPES: dict[str, RecipeMaker] = {name: partial(make_recipe, spec) for name, spec in RECIPE_SPECS.items()}


def attach_recipes(
    model: nn.Module,
    patterns: Mapping[str, str],
    kernels: BoundKernels,
    options: PrecisionConfig = DEFAULT_OPTIONS,
    held_elsewhere: Iterable[str] = (),
) -> None:
    """Give every product its recipe and the kernels for it. Of several patterns that match a product the last counts; a
    product that none matches is plain. `held_elsewhere`: names of products on other pipeline ranks."""
    products = named_products(model)
    names = sorted({*products, *held_elsewhere})
    recipe_of = dict.fromkeys(names, "plain")
    for pattern, recipe in patterns.items():
        one_of("precision recipe", recipe, RECIPES)
        matched = products_matching(pattern, names)
        recipe_of |= dict.fromkeys(matched, recipe)
    used = {recipe: RECIPES[recipe](kernels, options) for recipe in set(recipe_of.values())}
    for name, product in products.items():
        recipe_for = used[recipe_of[name]]
        product.use_recipe(recipe_for(name, product), kernels)
    bind_fused_kernels(model)


def bind_fused_kernels(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FusesProducts):
            module.bind_fused_kernel()


def products_matching(pattern: str, names: list[str]) -> list[str]:
    matched = fnmatch.filter(names, pattern)
    if matched:
        return matched
    near = did_you_mean(pattern, names)
    raise UserError(f'no product of the model matches "{pattern}"{near}; * stands for any part of a name')


def named_products(model: nn.Module) -> dict[str, Product]:
    """Every linear layer and grouped product by its path in the model."""
    products: dict[str, Product] = {}
    for name, module in model.named_modules():
        if isinstance(module, Product):
            products[name] = module
    return products


def weight_formats(model: nn.Module) -> dict[str, WeightFormat]:
    """The FP8 format of every weight that a product reads in FP8, by the name of the parameter."""
    format_of: dict[int, WeightFormat] = {}  # by the identity of a weight's declaration
    for product in named_products(model).values():
        if isinstance(product.recipe, Fp8Recipe):
            weight = product.placed_weight
            assert weight is not None, "a product of a model declares its weight"
            format_of[id(weight.declaration)] = product.recipe.weight_format
    formats: dict[str, WeightFormat] = {}
    for parameter in declared_parameters(model):
        format = format_of.get(id(parameter.declaration))
        if format is not None:
            formats[parameter.name] = format
    return formats


class RecipeState:
    """The tensors that a model's recipes keep between steps, for checkpoints."""

    def __init__(self, model: nn.Module):
        self.model = model

    def named_state(self) -> Iterator[tuple[str, Tensor | PartOfTensor]]:
        """By product and kind: `blocks.0.attention.out.input_maximum`."""
        for name, product in named_products(self.model).items():
            for kind, tensor in product.recipe.state().items():
                yield f"{name}.{kind}", tensor
