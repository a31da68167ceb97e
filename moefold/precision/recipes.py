"""Precision recipes by name, and their attachment to a model's products by name pattern.

    attach_recipes(model, {"blocks.*.experts.*": "fp8_block", "blocks.*.attention.*": "plain"}, kernels)

A product is a `Linear` or a `GroupedLinear`; its name is its path in the model. A recipe maker gets the kernels and
the options of the section `precision`, and returns a function from a product to its recipe: stateless recipes are one
object for all products, a recipe with state is made for each product. Layers that read one input are multiplied
together where they share a recipe object, or the history of that input.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import cast

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
from moefold.precision.linear import FusesProducts, GroupedLinear, Linear, LinearGroup, PlacedWeight
from moefold.precision.microscaling import MicroscalingRecipe

Product = Linear | GroupedLinear
NamedProducts = dict[str, Product]
WeightFormats = dict[str, WeightFormat]  # by the name of a parameter
RecipeOfProduct = Callable[[str, Product], Recipe]  # of a product and its name
RecipeMaker = Callable[[BoundKernels, PrecisionConfig], RecipeOfProduct]
DEFAULT_OPTIONS = PrecisionConfig()


def make_recipe(spec: RecipeSpec, kernels: BoundKernels, options: PrecisionConfig) -> RecipeOfProduct:
    """The recipe that the table describes: one object for all products, or one for each where scales are delayed or
    rounding depends on the product."""

    def microscaling_recipe(name: str, product: Product) -> Recipe:
        weight = placed_weight(product)
        return MicroscalingRecipe(spec, options, kernels, name, weight)

    def delayed_recipe(_name: str, product: Product) -> Recipe:
        weight = placed_weight(product)
        reads_tokens = isinstance(product, GroupedLinear) and product.reads_tokens
        return DelayedFp8Recipe(spec, options, kernels, weight, reads_tokens)

    if spec.is_emulated:
        return microscaling_recipe
    if options.scaling == "delayed" and spec.scales_in_epilogue:
        return delayed_recipe
    recipe: Recipe = PLAIN
    if spec.quantises:
        recipe = Fp8Recipe(spec, options, kernels)

    def shared_recipe(_name: str, _product: Product) -> Recipe:
        return recipe

    return shared_recipe


def placed_weight(product: Product) -> PlacedWeight:
    weight = product.placed_weight
    assert weight is not None, "the weight's placement tells which experts and outputs a rank holds"
    return weight


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
    everywhere = {*products, *held_elsewhere}
    names = sorted(everywhere)
    recipe_of = dict.fromkeys(names, "plain")
    for pattern, recipe in patterns.items():
        one_of("precision recipe", recipe, RECIPES)
        matched = products_matching(pattern, names)
        recipe_of |= dict.fromkeys(matched, recipe)
    made: dict[str, RecipeOfProduct] = {}
    used = set(recipe_of.values())
    for recipe in used:
        make = RECIPES[recipe]
        made[recipe] = make(kernels, options)
    for name, product in products.items():
        recipe_name = recipe_of[name]
        recipe = made[recipe_name](name, product)
        product.use_recipe(recipe, kernels)
    join_inputs(model)
    bind_fused_kernels(model)


def join_inputs(model: nn.Module) -> None:
    """Let layers that read one input have one history of it."""
    for module in model.modules():
        if isinstance(module, LinearGroup):
            recipes = [layer.recipe for layer in module.layers]
            if all(isinstance(recipe, DelayedFp8Recipe) for recipe in recipes):
                join_inputs_of_group(cast(list[DelayedFp8Recipe], recipes))


def join_inputs_of_group(recipes: list[DelayedFp8Recipe]) -> None:
    """All of a group or none: layers that quantise one input apart count its saturated values apart."""
    first, *others = recipes
    if all(other.could_read_input_of(first) for other in others):
        for other in others:
            other.read_input_of(first)


def bind_fused_kernels(model: nn.Module) -> None:
    for module in model.modules():
        if fuses_products(type(module)):
            cast(FusesProducts, module).bind_fused_kernel()


@cache  # of a class: a protocol takes long to look at every module
def fuses_products(kind: type[nn.Module]) -> bool:
    return issubclass(kind, FusesProducts)


def products_matching(pattern: str, names: list[str]) -> list[str]:
    matched = fnmatch.filter(names, pattern)
    if matched:
        return matched
    near = did_you_mean(pattern, names)
    raise UserError(f'no product of the model matches "{pattern}"{near}; * stands for any part of a name')


def named_products(model: nn.Module) -> NamedProducts:
    """Every linear layer and grouped product by its path in the model."""
    products: NamedProducts = {}
    for name, module in model.named_modules():
        if isinstance(module, Product):
            products[name] = module
    return products


def weight_formats(model: nn.Module) -> WeightFormats:
    """The FP8 format of every weight that a product reads in FP8, by the name of the parameter."""
    format_of: dict[int, WeightFormat] = {}  # by the identity of a weight's declaration
    products = named_products(model)
    for product in products.values():
        if isinstance(product.recipe, Fp8Recipe):
            weight = placed_weight(product)
            identity = id(weight.declaration)
            format_of[identity] = product.recipe.weight_format
    formats: WeightFormats = {}
    for parameter in declared_parameters(model):
        identity = id(parameter.declaration)
        if identity in format_of:
            formats[parameter.name] = format_of[identity]
    return formats


class RecipeState:
    """The tensors that a model's recipes keep between steps, for checkpoints."""

    def __init__(self, model: nn.Module):
        self.model = model

    def named_state(self) -> Iterator[tuple[str, Tensor | PartOfTensor]]:
        """By product and kind: `blocks.0.attention.out.input_maximum`."""
        products = named_products(self.model)
        for name, product in products.items():
            state = product.recipe.state()
            for kind, tensor in state.items():
                yield f"{name}.{kind}", tensor
