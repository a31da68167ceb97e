"""Precision recipes of each layer's products in a plan. Torch-free; the recipes are those of
`config/precision_recipes.py`, the products those of `anatomy/products.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from moefold.anatomy.products import ProductSpec, choose_recipes, model_products
from moefold.config.precision_recipes import RECIPE_SPECS, RecipeSpec, parse_recipe_entries
from moefold.config.run import ModelConfig, ParallelConfig, PrecisionConfig

PLAIN = RECIPE_SPECS["plain"]
PLAIN_PRECISION = PrecisionConfig()


@dataclass(frozen=True)
class LayerRecipes:
    """Recipe of each product of a layer, by the product's place; empty where all products are plain."""

    named: tuple[tuple[str, str], ...] = ()

    @cached_property
    def specs(self) -> dict[str, RecipeSpec]:
        return {place: RECIPE_SPECS[recipe] for place, recipe in self.named}

    def spec(self, place: str) -> RecipeSpec:
        return self.specs.get(place, PLAIN)

    def specs_of(self, places: Iterable[str]) -> list[RecipeSpec]:
        """Recipes of the products among these that the layer has."""
        return [self.specs[place] for place in places if place in self.specs]

    def keeps_input(self, places: Iterable[str]) -> bool:
        """Whether a product among these keeps its input as it is for the weight gradient, not in FP8."""
        specs = self.specs_of(places)
        return not specs or any(spec.columns == "none" for spec in specs)


PLAIN_LAYER = LayerRecipes()


def quantises_products(precision: PrecisionConfig) -> bool:
    """Whether some recipe in use has FP8 operands."""
    names = [precision.recipe]
    names += [entry.recipe for entry in parse_recipe_entries(precision.recipes)]
    return any(RECIPE_SPECS[name].quantises for name in names)


@lru_cache(maxsize=256)
def recipes_of_layers(model: ModelConfig, precision: PrecisionConfig) -> tuple[LayerRecipes, ...]:
    """Recipes by number of the layer; layers of multi-token prediction come last."""
    count = model.layers + model.mtp
    if not quantises_products(precision):
        return (PLAIN_LAYER,) * count
    products = list(model_products(model, ParallelConfig()))
    chosen, _ = choose_recipes(products, precision, model.layers)
    named: list[list[tuple[str, str]]] = []
    for _ in range(count):
        named.append([])
    for choice in chosen:
        number = layer_number(choice.product, model)
        place = choice.product.place
        named[number].append((place, choice.recipe))
    recipes = [LayerRecipes(tuple(places)) for places in named]
    return tuple(recipes)


def layer_number(product: ProductSpec, model: ModelConfig) -> int:
    if product.layer is not None:
        return product.layer
    _, depth, *_ = product.prefix.split(".")
    return model.layers + int(depth)
