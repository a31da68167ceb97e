"""Tensors of products in FP8: copies of weights, copies kept for backward, and temporaries of the experts.

    copy of a weight         one byte a value in each of two layouts, and fp32 scales
    copy of an input         along columns: one byte a value and an fp32 scale for 128 rows, of rows in tiles
    rows in tiles            each expert's rows fill tiles of 128; the number of tiles depends on shapes alone

A test compares them with the tensors of a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import ceil, prod

from moefold.anatomy.products import GROUPED_PRODUCTS
from moefold.anatomy.step_specs import WeightSpec
from moefold.config.precision_recipes import MX_BLOCK, NV_BLOCK, SCALE_BLOCK, RecipeSpec
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.layer.tensor_table import (
    ShapeCondition,
    ShapeFunction,
    TensorTable,
    WorkingSet,
    arrived_tokens,
    dispatched_token_width,
    expert_inner_width,
    expert_preactivation_width,
    expert_rows,
    expert_weight_rows,
    rank_tokens,
    separate_expert_wgrad,
    stream_width,
)

SCALE_BYTES = 4
FP8_COLUMN_BYTES = 1 + SCALE_BYTES / SCALE_BLOCK
MICRO_VALUE_BYTES = {"mxfp8": 1 + 1 / MX_BLOCK, "nvfp4": 0.5 + 1 / NV_BLOCK}  # with the byte of a block's scale
TILE_NUMBERS = 4  # int32 in the table of tiles: expert, first row, rows, first padded row

ProductGroups = Sequence[Sequence[str]]  # products that are called as one op


# Weights.


def copy_bytes(weight: WeightSpec, recipe: RecipeSpec, s: RankShapes) -> float:
    """Bytes of both layouts of a weight on this rank, with their scales."""
    *outer, inputs = weight.part(s.portion.degrees)
    experts = outer.pop(0) if weight.name in GROUPED_PRODUCTS else 1
    outputs = prod(outer)
    if recipe.is_emulated:
        value = MICRO_VALUE_BYTES[recipe.format]
        return experts * 2 * outputs * inputs * value
    output_blocks = ceil(outputs / SCALE_BLOCK)
    input_blocks = ceil(inputs / SCALE_BLOCK)
    scales = {
        "none": 0,
        "expert": 2,
        "channel": outputs + inputs,
        "block": 2 * output_blocks * input_blocks,
    }
    values = 2 * outputs * inputs
    scale_bytes = SCALE_BYTES * scales[recipe.weight]
    return experts * (values + scale_bytes)


def quantise_pass_bytes(recipe: RecipeSpec, copies: int, s: RankShapes) -> float:
    """Bytes moved to quantise a value to so many copies: a read in the model's dtype, a further one for the largest
    magnitude where a scale is wider than a tile, and a byte for each copy. Scales are left out: 3 % at most."""
    reads = 2 if recipe.scales_in_epilogue else 1
    return reads * s.recipe.wide + copies


# Rows in tiles.


def tile_count(rows: float, experts: float) -> float:
    return rows // SCALE_BLOCK + experts


def padded_rows(rows: float, experts: float) -> float:
    return SCALE_BLOCK * tile_count(rows, experts)


def expert_tiles(s: RankShapes) -> float:
    return tile_count(s.R, s.e)


def expert_rows_in_tiles(s: RankShapes) -> float:
    return padded_rows(s.R, s.e)


def one_expert(_: RankShapes) -> float:
    return 1.0


def held_experts(s: RankShapes) -> float:
    return s.e


def tile_width(_: RankShapes) -> float:
    return TILE_NUMBERS


# Inputs of products.


def operands_of_group(group: Sequence[str], s: RankShapes) -> list[RecipeSpec]:
    """Recipe of each quantised operand that a group keeps of its input: one for all products where one op quantises it,
    otherwise one for each."""
    specs = s.products.specs_of(group)
    quantised = [spec for spec in specs if spec.quantises]
    if not quantised:
        return []
    one_op = s.chosen_implementation("linear") != "reference"
    one_recipe = len(set(specs)) == 1
    return quantised[:1] if one_op and one_recipe else quantised


def operands_of_groups(groups: ProductGroups, s: RankShapes) -> list[RecipeSpec]:
    operands: list[RecipeSpec] = []
    for group in groups:
        operands += operands_of_group(group, s)
    return operands


def count_operands(groups: ProductGroups, s: RankShapes) -> int:
    return len(operands_of_groups(groups, s))


def count_copies(groups: ProductGroups, s: RankShapes) -> float:
    """Copies along columns, in the size of one in FP8."""
    operands = operands_of_groups(groups, s)
    return sum(map(relative_copy_size, operands))


def relative_copy_size(recipe: RecipeSpec) -> float:
    if recipe.columns == "none":
        return 0.0
    value = MICRO_VALUE_BYTES.get(recipe.format, FP8_COLUMN_BYTES)
    return value / FP8_COLUMN_BYTES


def keeps_input_of(groups: ProductGroups) -> ShapeCondition:
    places = list(chain.from_iterable(groups))

    def keeps_input(s: RankShapes) -> bool:
        return s.products.keeps_input(places)

    return keeps_input


def add_product_input(
    table: TensorTable,
    name: str,
    rows: ShapeFunction,
    width: ShapeFunction,
    *groups: Sequence[str],
    read_by: tuple[str, ...] = (),
    made_by: tuple[str, ...] = (),
    experts: ShapeFunction = one_expert,
) -> None:
    """Add the input of products, as it is or as copies in FP8. `made_by`: the regions whose output it is, and whose
    recompute yields it; copies are the products' own."""
    whole = table.only(keeps_input_of(groups))
    if made_by:
        whole = whole.remade_by(*made_by, *table.regions)
    whole.add(name, rows, width, "linear", read_by=read_by)
    add_input_copies(table, name, rows, width, *groups, experts=experts)


def add_input_copies(
    table: TensorTable,
    name: str,
    rows: ShapeFunction,
    width: ShapeFunction,
    *groups: Sequence[str],
    experts: ShapeFunction = one_expert,
) -> None:
    """Add the copies in FP8 that products keep of their input, and their tables of tiles."""

    def has_operands(s: RankShapes) -> bool:
        return count_operands(groups, s) > 0

    def rows_in_tiles(s: RankShapes) -> float:
        return padded_rows(rows(s), experts(s))

    def width_of_copies(s: RankShapes) -> float:
        return width(s) * count_copies(groups, s)

    def tiles(s: RankShapes) -> float:
        return tile_count(rows(s), experts(s))

    def width_of_tiles(s: RankShapes) -> float:
        return TILE_NUMBERS * count_operands(groups, s)

    quantised = table.only(has_operands)
    quantised.add(f"{name}, FP8 along columns", rows_in_tiles, width_of_copies, "columns")
    quantised.add(f"tiles of {name}", tiles, width_of_tiles, "tiles")


# Experts as one function.


def fused_fp8_experts(s: RankShapes) -> bool:
    return s.fuses_fp8_experts


def fp8_expert_wgrad(s: RankShapes) -> bool:
    return s.fp8_expert_wgrad


def wide_expert_wgrad(s: RankShapes) -> bool:
    """Whether weight gradients of experts in FP8 have operands in the model's own dtype."""
    return s.fuses_fp8_experts and not s.fp8_expert_wgrad


def quantises_activation_later(s: RankShapes) -> bool:
    """Whether the activation has a scale wider than a tile, and is written before it is quantised."""
    return s.expert_recipe is not None and s.expert_recipe.scales_in_epilogue


def add_expert_preactivation(table: TensorTable) -> None:
    read = table.read_by("activation")
    in_fp8 = read.only(fp8_expert_wgrad)
    in_fp8.add("pre-activation", expert_rows_in_tiles, expert_preactivation_width, "fp8")
    wide = read.only(wide_expert_wgrad)
    wide.add("pre-activation", expert_rows_in_tiles, expert_preactivation_width)
    fused = table.only(fused_fp8_experts)
    fused.add("tiles", expert_tiles, tile_width, "tiles")


def add_recomputed_activation(table: TensorTable) -> None:
    """Add the activation that a deferred weight gradient reads."""
    name = "activation, recomputed"
    in_fp8 = table.only(fp8_expert_wgrad)
    in_fp8.add(name, expert_rows_in_tiles, expert_inner_width, "fp8")
    wide = table.only(wide_expert_wgrad)
    wide.add(name, expert_rows_in_tiles, expert_inner_width)


def copies_of_gradient(s: RankShapes) -> int:
    """Copies in FP8 of a gradient: along rows, and along columns for weight gradients in FP8."""
    return 2 if s.fp8_expert_wgrad else 1


def result_copies_width(s: RankShapes) -> float:
    return s.W * copies_of_gradient(s)


def preactivation_copies_width(s: RankShapes) -> float:
    return expert_preactivation_width(s) * copies_of_gradient(s)


def fp8_expert_table() -> TensorTable:
    return TensorTable().only(fused_fp8_experts)


def fp8_expert_forward_up() -> WorkingSet:
    """Working set of the first product: gathered tokens and its activation."""
    table = fp8_expert_table()
    table.add("rows in FP8", expert_rows_in_tiles, dispatched_token_width, "fp8")
    table.add("activated, in FP8", expert_rows_in_tiles, expert_inner_width, "fp8")
    later = table.only(quantises_activation_later)
    later.add("activated", expert_rows_in_tiles, expert_inner_width)
    return table.entries


def fp8_expert_forward_down() -> WorkingSet:
    table = fp8_expert_table()
    table.add("activated, in FP8", expert_rows_in_tiles, expert_inner_width, "fp8")
    table.add("results", expert_rows, dispatched_token_width)
    return table.entries


def fp8_expert_backward_table() -> TensorTable:
    table = fp8_expert_table()
    table.add("gradient of the stream", rank_tokens, stream_width)
    table.add("gradient of results", expert_rows, dispatched_token_width)
    return table


def fp8_expert_backward_down() -> WorkingSet:
    """Working set when the gradients of activation and pre-activation are there, and the weight gradient of down."""
    table = fp8_expert_backward_table()
    table.add("gradient of results, in FP8", expert_rows_in_tiles, result_copies_width, "fp8")
    table.add("gradient of the pre-activation", expert_rows_in_tiles, expert_preactivation_width)
    table.add("activation, recomputed", expert_rows_in_tiles, expert_inner_width)
    columns = table.only(fp8_expert_wgrad)
    columns.add("activation, FP8 along columns", expert_rows_in_tiles, expert_inner_width, "fp8")
    wide = table.only(wide_expert_wgrad)
    wide.add("gradient of results, in tiles", expert_rows_in_tiles, dispatched_token_width)
    table.only(separate_expert_wgrad).add("gradient of down", expert_weight_rows, expert_inner_width)
    return table.entries


def fp8_expert_backward_up() -> WorkingSet:
    """Working set of the data gradient of up."""
    table = fp8_expert_backward_table()
    table.add("gradient of the pre-activation", expert_rows_in_tiles, expert_preactivation_width)
    table.add("gradient of the pre-activation, in FP8", expert_rows_in_tiles, preactivation_copies_width, "fp8")
    table.add("gradient of rows", expert_rows, dispatched_token_width)
    table.add("gradient of arrived tokens", arrived_tokens, dispatched_token_width)
    table.only(separate_expert_wgrad).add("gradient of down", expert_weight_rows, expert_inner_width)
    return table.entries


def fp8_expert_backward_end() -> WorkingSet:
    """Working set of the weight gradient of up."""
    table = fp8_expert_backward_table()
    table.add("gradient of arrived tokens", arrived_tokens, dispatched_token_width)
    columns = table.only(fp8_expert_wgrad)
    columns.add("gradient of the pre-activation, in FP8", expert_rows_in_tiles, expert_preactivation_width, "fp8")
    columns.add("rows, FP8 along columns", expert_rows_in_tiles, dispatched_token_width, "fp8")
    wide = table.only(wide_expert_wgrad)
    wide.add("gradient of the pre-activation", expert_rows_in_tiles, expert_preactivation_width)
    wide.add("rows in tiles", expert_rows_in_tiles, dispatched_token_width)
    gradients = table.only(separate_expert_wgrad)
    gradients.add("gradient of down", expert_weight_rows, expert_inner_width)
    gradients.add("gradient of up", expert_weight_rows, expert_preactivation_width)
    return table.entries


FP8_EXPERT_FORWARD = [fp8_expert_forward_up(), fp8_expert_forward_down()]
FP8_EXPERT_BACKWARD = [fp8_expert_backward_down(), fp8_expert_backward_up(), fp8_expert_backward_end()]


# Dense products.


def fp8_product_backward(place: str, rows: ShapeFunction, width: ShapeFunction) -> WorkingSet:
    """Working set of a dense product's backward: the gradient of its output, and its copies in FP8."""

    def in_fp8(s: RankShapes) -> bool:
        recipe = s.products.spec(place)
        return recipe.quantises

    def rows_in_tiles(s: RankShapes) -> float:
        return padded_rows(rows(s), 1)

    def width_of_copies(s: RankShapes) -> float:
        recipe = s.products.spec(place)
        copies = 1 if recipe.columns == "none" else 2
        return width(s) * copies

    table = TensorTable().only(in_fp8)
    table.add("gradient of the stream", rank_tokens, stream_width)
    table.add("gradient of the output", rows, width)
    table.add("gradient of the output, in FP8", rows_in_tiles, width_of_copies, "fp8")
    return table.entries
