"""The number formats of a model's products in words, for `explain`: what each product reads, how it sums, and why.
Torch-free.

Layers whose products agree are told together: `3 x MoE layer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moefold.anatomy.products import ProductRecipe, ProductSpec, product_recipes
from moefold.anatomy.step_specs import is_moe_layer
from moefold.config.precision_recipes import (
    RECIPE_SPECS,
    SCALES_IN_WORDS,
    SUMS_IN_WORDS,
    WEIGHT_SCALES_IN_WORDS,
    RecipeSpec,
    squares_in_use,
)
from moefold.config.run import Config, PrecisionConfig


@dataclass(frozen=True)
class MicroFormatInWords:
    values: str
    scale: str
    row: str
    square: str


MICRO_FORMATS_IN_WORDS = {
    "mxfp8": MicroFormatInWords("e4m3", "a power of two", "32 values", "32 x 32 values"),
    "nvfp4": MicroFormatInWords("e2m1", "an e4m3 scale and one of the matrix", "16 values", "16 x 16 values"),
}
GATE_ADVICE = "model.moe.gate output would keep the router's weight out of its scale"


@dataclass(frozen=True)
class ProductFormat:
    """Products of the same name and recipe in layers of one kind."""

    where: str
    product: str
    recipe: str
    why: str


def product_formats(config: Config) -> dict[ProductFormat, int]:
    """Every kind of product with the number of layers that have it, in the order of the model."""
    counts: dict[ProductFormat, int] = {}
    for chosen in product_recipes(config):
        kind = product_format(chosen, config)
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def product_format(chosen: ProductRecipe, config: Config) -> ProductFormat:
    product = chosen.product
    spec = RECIPE_SPECS[chosen.recipe]
    why = chosen.why
    gate_is_inside = config.model.moe.gate == "activation"
    if spec.wants_gate_after_down and gate_is_inside and product.place.endswith("experts.down_product"):
        why += f"; {GATE_ADVICE}"
    kind = layer_kind(product, config)
    return ProductFormat(kind, product.place, chosen.recipe, why)


def layer_kind(product: ProductSpec, config: Config) -> str:
    if product.layer is None:
        return "layer ahead"
    return "MoE layer" if is_moe_layer(config.model, product.layer) else "dense layer"


def recipe_in_words(
    recipe: str,
    precision: PrecisionConfig,
    dtype: str,
    has_micro_formats: bool = False,
) -> dict[str, str]:
    """What the three products of a recipe read, and how they sum. `has_micro_formats`: the card multiplies them."""
    spec = RECIPE_SPECS[recipe]
    if not spec.quantises:
        return dict.fromkeys(("forward", "data_gradient", "weight_gradient"), dtype)
    if spec.is_emulated:
        return micro_format_in_words(spec, precision, has_micro_formats)
    gradient = precision.gradient_format
    rows = row_scales_in_words(spec, precision)
    weight = f"W e4m3, {WEIGHT_SCALES_IN_WORDS[spec.weight]}"
    sums = SUMS_IN_WORDS[spec.row_sums(precision.accumulate)]
    return {
        "forward": f"x e4m3, {rows}; {weight}; {sums}",
        "data_gradient": f"dy {gradient}, {rows}; {weight}; {sums}",
        "weight_gradient": weight_gradient_in_words(spec, precision, dtype),
    }


EMULATED = "emulated: product of dequantised operands"
SUMS_OF_TENSOR_CORES = {
    "mxfp8": "product of the tensor cores (scaled_mm, scaled_grouped_mm; never run)",
    "nvfp4": "product of the tensor cores (scaled_mm; never run), emulated for experts",
}
EMULATED_FOR_EXPERTS = "product of the tensor cores (scaled_mm; never run), emulated for experts"


def micro_format_in_words(spec: RecipeSpec, precision: PrecisionConfig, has_formats: bool) -> dict[str, str]:
    """Operands of MXFP8 and NVFP4. Their products are emulated where the card does not have them."""
    micro = MICRO_FORMATS_IN_WORDS[spec.format]
    has_squares = squares_in_use(spec.format, precision.weight_blocks)
    weight = f"W {micro.values}, {micro.scale} for {micro.square if has_squares else micro.row}"
    rows = f"{micro.values}, {micro.scale} for {micro.row}"
    gradient = rows
    columns = rows
    if spec.format == "nvfp4":
        gradient += ", stochastic rounding" if precision.stochastic else ""
        columns = f"{gradient}, of dy and x behind a Hadamard transform" if precision.hadamard else gradient
    sums = SUMS_OF_TENSOR_CORES[spec.format] if has_formats else EMULATED
    return {
        "forward": f"x {rows}; {weight}; {sums}",
        "data_gradient": f"dy {gradient}; {weight}; {sums}",
        "weight_gradient": f"x and dy {columns}; {EMULATED_FOR_EXPERTS if has_formats else EMULATED}",
    }


def storage_in_words(precision: PrecisionConfig, dtype: str) -> str:
    """What is kept of weights that products read in FP8."""
    if precision.storage == "fp8":
        return "e4m3 in both layouts and no copy in another dtype; fp32 main weights on the rank that updates them"
    return f"{dtype}, and e4m3 in both layouts"


def row_scales_in_words(spec: RecipeSpec, precision: PrecisionConfig) -> str:
    """Rows of delayed scales have that of their expert or tensor."""
    current = SCALES_IN_WORDS[spec.rows]
    if not has_delayed_scales(spec, precision):
        return current
    shared = SCALES_IN_WORDS["tensor"]
    return f"{shared}, from the last {precision.history} steps (tokens of experts: {current}, current)"


def weight_gradient_in_words(spec: RecipeSpec, precision: PrecisionConfig, dtype: str) -> str:
    if spec.columns == "none":
        return f"x and dy {dtype}"
    columns = SCALES_IN_WORDS[spec.columns]
    if has_delayed_scales(spec, precision):
        columns += f", from the last {precision.history} steps (tokens of experts: current)"
    return f"x e4m3, dy {precision.gradient_format}, {columns}; {SUMS_IN_WORDS[spec.weight_sums]}"


def has_delayed_scales(spec: RecipeSpec, precision: PrecisionConfig) -> bool:
    return precision.scaling == "delayed" and spec.scales_in_epilogue


def experts_recipe(config: Config) -> str:
    """The recipe of routed experts; where layers differ, the first that is not plain. A base in blocks is one."""
    if config.lora.base != "plain":
        return config.lora.base
    recipes = recipes_of_experts(product_recipes(config))
    quantised = [recipe for recipe in recipes if recipe != "plain"]
    return quantised[0] if quantised else "plain"


def recipes_of_experts(chosen: Iterable[ProductRecipe]) -> list[str]:
    of_experts = [each for each in chosen if each.product.place.startswith("moe.experts.")]
    return [each.recipe for each in of_experts]
