"""Precision recipes: how each one scales the operands of a linear product and sums the product. Torch-free.

Config, `explain`, planner and model read this table; nothing else states what a recipe is. The three products of a
layer:

    forward            y  = x W^T       operands x along rows, W
    data gradient      dx = dy W        operands dy along rows, W
    weight gradient    dW = dy^T x      operands dy and x along columns

Entries of `precision.recipes` are `blocks.0.*: plain`: a shell pattern over the names of products, and a recipe. Of
several entries that match a product the last counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from typing import Literal

from moefold.config.entry_lists import parse_each_entry, problems_of_entries
from moefold.config.errors import did_you_mean

SCALE_BLOCK = 128  # values that share a scale along the contraction; rows of a tile
MX_BLOCK = 32
NV_BLOCK = 16
WIDTH_MULTIPLE = 16  # FP8 kernels read rows that begin at multiples of 16 bytes

NVFP4_PLAIN_LAYERS = 0.15  # share of layers, the last ones, that nvfp4 leaves plain by default

NumberFormat = Literal["plain", "fp8", "mxfp8", "nvfp4"]
RowScales = Literal["none", "block", "tensor", "row", "micro"]
WeightScales = Literal["none", "block", "expert", "channel", "micro"]
ColumnScales = Literal["none", "block", "tensor", "channel", "micro"]
Sums = Literal["plain", "block", "promoted", "fast"]

SCALES_IN_WORDS = {  # of rows and columns
    "block": "a scale for 128 values",
    "tensor": "a scale for a tensor, or for the rows of an expert",
    "row": "a scale for each token",
    "channel": "a scale for each channel of an expert's rows",
}
WEIGHT_SCALES_IN_WORDS = {
    "block": "a scale for 128 x 128 values",
    "expert": "a scale for a matrix",
    "channel": "a scale for each output of the product",
}
SUMS_IN_WORDS = {
    "block": "fp32 sums of scaled blocks of 128",
    "promoted": "fp32 sums of blocks of 128, scaled at the end",
    "fast": "sums of the tensor core, scaled at the end",
}


@dataclass(frozen=True)
class RecipeSpec:
    """One recipe. `rows`: scales of x and of dy in the first two products; one of "tensor" is one for all tokens where
    rows are tokens, and one for each expert otherwise. `weight`: scales of W. `columns`: scales of x and dy in the
    weight gradient; "none": that product runs in the model's own precision. "micro": the small blocks of MXFP8 or
    NVFP4. `row_multiple`: each expert's rows fill tiles of so many rows. `wants_gate_after_down`: rows of an expert
    share a scale, so that the router's weight inside the activation costs accuracy (`model.moe.gate` decides)."""

    name: str
    format: NumberFormat = "plain"
    rows: RowScales = "none"
    weight: WeightScales = "none"
    columns: ColumnScales = "none"
    row_multiple: int = 1
    wants_gate_after_down: bool = False

    @property
    def quantises(self) -> bool:
        return self.rows != "none"

    @property
    def is_emulated(self) -> bool:
        """Whether operands are quantised and the product runs on what they dequantise to."""
        return self.rows == "micro"

    @property
    def scales_in_epilogue(self) -> bool:
        """Whether scales are applied to finished sums, so that these may be summed in the tensor core."""
        return self.rows in ("tensor", "row")

    def row_sums(self, accumulate: str) -> Sums:
        """Summation of forward and data gradient under `precision.accumulate`."""
        if not self.quantises or self.is_emulated:
            return "plain"
        if not self.scales_in_epilogue:
            return "block"
        return "fast" if accumulate == "fast" else "promoted"

    @property
    def weight_sums(self) -> Sums:
        """Summation of the weight gradient: promoted to fp32 whatever `precision.accumulate` says."""
        if self.columns in ("none", "micro"):
            return "plain"
        return "block" if self.columns == "block" else "promoted"


RECIPE_SPECS: dict[str, RecipeSpec] = {
    spec.name: spec
    for spec in (
        RecipeSpec("plain"),
        RecipeSpec("fp8_block", "fp8", "block", "block", "block", SCALE_BLOCK),
        RecipeSpec("fp8_tensor", "fp8", "tensor", "expert", "tensor", SCALE_BLOCK, wants_gate_after_down=True),
        RecipeSpec("fp8_row", "fp8", "row", "channel", "channel", SCALE_BLOCK),
        RecipeSpec("fp8_hybrid", "fp8", "block", "block", "none", SCALE_BLOCK),
        RecipeSpec("mxfp8", "mxfp8", "micro", "micro", "micro", MX_BLOCK),
        RecipeSpec("nvfp4", "nvfp4", "micro", "micro", "micro", NV_BLOCK),
    )
}


def is_fp8(recipe: str) -> bool:
    """Whether products of this recipe have FP8 operands. Names of recipes from elsewhere are not in the table."""
    return recipe in RECIPE_SPECS and RECIPE_SPECS[recipe].format == "fp8"


def squares_in_use(format: NumberFormat, weight_blocks: str) -> bool:
    """Whether the weights of a micro format have scales of squares, which `auto` takes for NVFP4."""
    return weight_blocks == "squares" or (weight_blocks == "auto" and format == "nvfp4")


def last_plain_layers(recipe: str, exclude_last: int, layers: int) -> int:
    """How many of the last layers a recipe leaves plain; `exclude_last` of -1 is the recipe's own choice."""
    if exclude_last >= 0:
        return exclude_last
    share = NVFP4_PLAIN_LAYERS if RECIPE_SPECS[recipe].format == "nvfp4" else 0
    return min(ceil(share * layers), layers - 1)


@dataclass(frozen=True)
class RecipeEntry:
    """One entry of `precision.recipes`."""

    pattern: str
    recipe: str

    def matches(self, product: str) -> bool:
        return fnmatchcase(product, self.pattern)


def parse_recipe_entries(entries: Iterable[str]) -> list[RecipeEntry]:
    """The entries of `precision.recipes`, in order; all that cannot be read are refused at once."""
    return parse_each_entry("precision.recipes", entries, parse_recipe_entry)


def parse_recipe_entry(entry: str) -> RecipeEntry:
    pattern, _, recipe = entry.partition(":")
    pattern = pattern.strip()
    recipe = recipe.strip()
    if not pattern or not recipe:
        raise ValueError("expected a pattern, a colon and a recipe, such as blocks.0.*: plain")
    if recipe not in RECIPE_SPECS:
        near = did_you_mean(recipe, RECIPE_SPECS)
        known = ", ".join(RECIPE_SPECS)
        raise ValueError(f'no recipe "{recipe}"{near}; there are: {known}')
    return RecipeEntry(pattern, recipe)


def recipe_entry_problems(entries: Iterable[str]) -> str:
    """The problems of the entries as text; empty if all can be read."""
    return problems_of_entries(parse_recipe_entries, entries)
