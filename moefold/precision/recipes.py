"""Precision recipes by name, and their attachment to a model's products by name pattern.

    attach_recipes(model, {"blocks.*.experts.*": "fp8_block", "blocks.*.attention.*": "plain"}, kernels)

A product is a `Linear` or a `GroupedLinear`; its name is its path in the model. A recipe maker gets the product and
returns its recipe: stateless recipes are one object for all products, a recipe with state is made for each product.
Layers that read one input are multiplied together where they share a recipe object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import filter as names_matching

import torch
from torch import nn

from moefold.config.errors import UserError, did_you_mean, one_of
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.product import PLAIN, Recipe
from moefold.precision.linear import GroupedLinear, Linear

Product = Linear | GroupedLinear
RecipeMaker = Callable[[Product], Recipe]


def plain_recipe(_: Product) -> Recipe:
    return PLAIN


RECIPES: dict[str, RecipeMaker] = {"plain": plain_recipe}


def attach_recipes(
    model: nn.Module, patterns: Mapping[str, str], kernels: BoundKernels, held_elsewhere: Iterable[str] = ()
) -> None:
    """Give every product its recipe and the kernels for it. Of several patterns that match a product the last counts; a
    product that none matches is plain. `held_elsewhere`: names of products on other pipeline ranks."""
    products = named_products(model)
    names = sorted({*products, *held_elsewhere})
    recipe_of = dict.fromkeys(products, "plain")
    for pattern, recipe in patterns.items():
        one_of("precision recipe", recipe, RECIPES)
        matched = names_matching(names, pattern)
        if not matched:
            near = did_you_mean(pattern, names)
            raise UserError(f'no product of the model matches "{pattern}"{near}; * stands for any part of a name')
        recipe_of |= {name: recipe for name in matched if name in products}
    for name, product in products.items():
        make_recipe = RECIPES[recipe_of[name]]
        product.use_recipe(make_recipe(product), kernels)


def named_products(model: nn.Module) -> dict[str, Product]:
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, Product)}


def recipe_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that recipes keep between steps, by product and kind: `blocks.0.attention.out.input_maximum`."""
    state: dict[str, torch.Tensor] = {}
    for name, product in named_products(model).items():
        for kind, tensor in product.recipe.state().items():
            state[f"{name}.{kind}"] = tensor
    return state
