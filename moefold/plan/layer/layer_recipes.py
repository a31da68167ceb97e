"""Precision recipes of each layer's products in a plan. Torch-free; the recipes are those of
`config/precision_recipes.py`, the products those of `anatomy/products.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from moefold.anatomy.products import ProductSpec, choose_recipes, model_products
from moefold.config.precision_recipes import RECIPE_SPECS, RecipeSpec, parse_recipe_entries
from moefold.config.run import ModelConfig, ParallelConfig, PrecisionConfig

PLAIN = RECIPE_SPECS["plain"]
PLAIN_PRECISION = PrecisionConfig()
NamedRecipe = tuple[str, str]  # place of a product, and its recipe


@dataclass(frozen=True)
class LayerRecipes:
    """Recipe of each product of a layer, by the product's place; empty where all products are plain."""

    named: tuple[NamedRecipe, ...] = ()

    @cached_property
    def specs(self) -> dict[str, RecipeSpec]:
        specs: dict[str, RecipeSpec] = {}
        for place, recipe in self.named:
            specs[place] = RECIPE_SPECS[recipe]
        return specs

    def spec(self, place: str) -> RecipeSpec:
        return self.specs.get(place, PLAIN)

    def specs_of(self, places: Iterable[str]) -> list[RecipeSpec]:
        """Recipes of the products among these that the layer has."""
        return [self.specs[place] for place in places if place in self.specs]

    def keeps_input(self, places: Iterable[str]) -> bool:
        """Whether a product among these keeps its input as it is for the weight gradient, not in FP8."""
        specs = self.specs_of(places)
        columns = [spec.columns for spec in specs]
        return not specs or "none" in columns


PLAIN_LAYER = LayerRecipes()


def quantises_products(precision: PrecisionConfig) -> bool:
    """Whether some recipe in use has FP8 operands."""
    entries = parse_recipe_entries(precision.recipes)
    names = [precision.recipe]
    names += [entry.recipe for entry in entries]
    specs = [RECIPE_SPECS[name] for name in names]
    return any(spec.quantises for spec in specs)


@lru_cache(maxsize=256)
def recipes_of_layers(model: ModelConfig, precision: PrecisionConfig) -> tuple[LayerRecipes, ...]:
    """Recipes by number of the layer; layers of multi-token prediction come last."""
    count = model.layers + model.mtp
    if not quantises_products(precision):
        return (PLAIN_LAYER,) * count
    alone = ParallelConfig()
    products = list(model_products(model, alone))
    chosen, _ = choose_recipes(products, precision, model.layers)
    named = defaultdict[int, list[NamedRecipe]](list)
    for choice in chosen:
        product = choice.product
        number = layer_number(product, model)
        recipe = product.place, choice.recipe
        named[number].append(recipe)
    by_layer: list[LayerRecipes] = []
    for number in range(count):
        recipes = tuple(named[number])
        by_layer.append(LayerRecipes(recipes))
    return tuple(by_layer)


def layer_number(product: ProductSpec, model: ModelConfig) -> int:
    if product.layer is not None:
        return product.layer
    _, depth, *_ = product.prefix.split(".")
    return model.layers + int(depth)
