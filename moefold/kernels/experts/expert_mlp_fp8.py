"""The routed experts' MLP in FP8, as one autograd function of quantised products (expert_mlp.py has the formulas).

    forward    tokens are quantised once and gathered as bytes; up with SwiGLU, down
    kept       tokens as they are, and the pre-activation in FP8 (as it is, if the recipe's weight gradients are bf16)
    backward   data gradients from rows, weight gradients from copies along columns, both quantised in one read

The same function runs everywhere: its products and quantisations are ops, plain torch on any device and kernels on
Hopper. N source rows, R rows in expert order, P in tiles of 128, D width, F inner width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from moefold.config.precision_recipes import RecipeSpec, Sums
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.activation_formats import ActivationFormats
from moefold.kernels.experts.fp8_swiglu import fp8_dswiglu_product, fp8_swiglu_product
from moefold.kernels.linear.fp8_product import fp8_product, fp8_weight_product, tile_weight_product
from moefold.kernels.linear.product import Role, ends_of_rows
from moefold.kernels.quantise.fp8 import Quantised, ScaleRule
from moefold.kernels.quantise.gather_tiles import gather_tiles
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles
from moefold.kernels.quantise.quantise_weight import QuantisedWeight
from moefold.kernels.quantise.row_tiles import RowTiles, row_tiles
from moefold.kernels.routing.expert_rows import sum_rows
from moefold.layout.deferred_wgrad import gradient_or_defer
from moefold.layout.gradient_sink import memory_for_gradient, running_gradient_sum
from moefold.layout.rerun import uses_expert_outputs


class Fp8Experts(Protocol):
    """What the experts ask of an FP8 recipe (precision/fp8.py). The recipes of the two products are alike but for the
    scales that they keep."""

    spec: RecipeSpec
    rule: ScaleRule
    row_sums: Sums
    weight_sums: Sums
    kernels: BoundKernels

    def weight(self, w: Tensor) -> QuantisedWeight: ...

    def quantise(
        self,
        x: Tensor,
        tiles: RowTiles,
        role: Role,
        rows: bool = False,
        columns: bool = False,
        index_R: Tensor | None = None,
    ) -> QuantisedTiles: ...

    def show_rows(self, x: Tensor, tiles: RowTiles) -> None:
        """For statistics alone: the values of an input that an epilogue quantised along rows."""
        ...


class Fp8ExpertMlp(torch.autograd.Function):
    """Weights are kept as the Parameter objects: their gradient sink and their FP8 copies are attributes."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Fp8Experts, down_recipe: Fp8Experts,
        source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E,
    ):  # fmt: skip
        kernels = recipe.kernels
        tiles = kernels[row_tiles](ends_E, len(index_R))
        x = gather_tokens(recipe, source_ND, tiles, index_R)
        h, a = kernels[fp8_swiglu_product](
            x,
            up_weight(recipe, gate_up_E2FD).forward,
            weight_R.float(),
            tiles,
            recipe.row_sums,
            activation_formats(recipe, source_ND.dtype),
        )
        del x
        if uses_expert_outputs():
            y_RD = down_product(recipe, down_recipe, a, down_EDF, tiles, len(index_R), source_ND.dtype)
        else:  # a rerun for the saved tensors alone
            y_RD = source_ND.new_empty(len(index_R), source_ND.shape[1])
        kept = (h, None) if isinstance(h, Tensor) else h
        ctx.recipes = (recipe, down_recipe)
        ctx.weights = (gate_up_E2FD, down_EDF)
        ctx.save_for_backward(source_ND, weight_R, index_R, slots_NK, *kept, *tiles)
        return y_RD

    @staticmethod
    def backward(ctx: Any, dy_RD):
        recipe: Fp8Experts
        down_recipe: Fp8Experts
        recipe, down_recipe = ctx.recipes
        kernels = recipe.kernels
        gate_up, down = ctx.weights
        source_ND, weight_R, index_R, slots_NK, h, h_scales, *tiles = ctx.saved_tensors
        tiles = RowTiles(*tiles)
        if h_scales is not None:
            h = Quantised(h, h_scales)
        dtype = source_ND.dtype
        fp8_wgrad = recipe.spec.columns != "none"
        # Down: the data gradient with SwiGLU's, and the weight gradient.
        dy_RD = dy_RD.contiguous()
        dy = down_recipe.quantise(dy_RD, tiles, "gradient", rows=True, columns=fp8_wgrad)
        dh_PN, a_PF, dweight_R = kernels[fp8_dswiglu_product](
            dy.wanted_rows,
            down_recipe.weight(down).transposed,
            h,
            weight_R.float(),
            tiles,
            recipe.row_sums,
            dtype,
        )
        del h
        padded = padded_tiles(tiles)
        if fp8_wgrad:
            a = down_recipe.quantise(a_PF, padded, "input", columns=True).wanted_columns
            compute_down = partial(fp8_weight_gradient, recipe, down, tiles, dy.wanted_columns, a)
        else:
            down_recipe.show_rows(a_PF, padded)
            compute_down = partial(plain_weight_gradient, recipe, down, tiles, in_tiles(recipe, dy_RD, tiles), a_PF)
        ddown = gradient_or_defer(down, compute_down)
        del dy, a_PF, compute_down
        # Up: the data gradient summed over each source row's slots, and the weight gradient.
        dh = recipe.quantise(dh_PN, padded, "gradient", rows=True, columns=fp8_wgrad)
        w = up_weight(recipe, gate_up).transposed
        dx_RD = kernels[fp8_product](dh.wanted_rows, w, tiles, len(index_R), recipe.row_sums, dtype)
        dsource_ND = kernels[sum_rows](dx_RD, index_R, slots_NK, True)
        del dx_RD
        left = dh.wanted_columns if fp8_wgrad else dh_PN
        del dh, dh_PN
        compute_up = partial(up_weight_gradient, recipe, gate_up, tiles, left, source_ND, index_R)
        dgate_up = gradient_or_defer(gate_up, compute_up)
        return None, None, dsource_ND, dgate_up, ddown, dweight_R.to(weight_R.dtype), None, None, None


def down_product(
    recipe: Fp8Experts,
    down_recipe: Fp8Experts,
    a: Quantised | Tensor,
    down_EDF: Tensor,
    tiles: RowTiles,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """y_RD from the activation, quantised by the product before it or here."""
    if isinstance(a, Tensor):
        a = down_recipe.quantise(a, padded_tiles(tiles), "input", rows=True).wanted_rows
    w = down_recipe.weight(down_EDF).forward
    return recipe.kernels[fp8_product](a, w, tiles, rows, recipe.row_sums, dtype)


def gather_tokens(recipe: Fp8Experts, source_ND: Tensor, tiles: RowTiles, index_R: Tensor) -> Quantised:
    """Tokens quantised along their rows, once each, and their bytes in the experts' order."""
    token_tiles = recipe.kernels[row_tiles](ends_of_rows(source_ND, None), len(source_ND))
    tokens = recipe.quantise(source_ND, token_tiles, "tokens", rows=True)
    return recipe.kernels[gather_tiles](*tokens.wanted_rows, tiles, index_R)


def up_weight(recipe: Fp8Experts, gate_up_E2FD: Tensor) -> QuantisedWeight:
    return recipe.weight(gate_up_E2FD.flatten(1, 2))


def activation_formats(recipe: Fp8Experts, dtype: torch.dtype) -> ActivationFormats:
    by_blocks = recipe.spec.rows == "block"
    fp8_kept = recipe.spec.columns != "none"
    return ActivationFormats(recipe.rule, by_blocks, fp8_kept, dtype)


def padded_tiles(tiles: RowTiles) -> RowTiles:
    """The same tiles for a tensor whose rows are in their padded places already."""
    tiles_M4 = tiles.tiles_M4.clone()
    tiles_M4[:, 1] = tiles.tiles_M4[:, 3]
    return tiles._replace(tiles_M4=tiles_M4)


def up_weight_gradient(
    recipe: Fp8Experts,
    gate_up: Tensor,
    tiles: RowTiles,
    dh: Quantised | Tensor,
    source_ND: Tensor,
    index_R: Tensor,
) -> Tensor | None:
    """Gathers the tokens when it is called: a deferred gradient holds the source rows only."""
    if isinstance(dh, Tensor):
        x_PD = in_tiles(recipe, source_ND, tiles, index_R)
        return plain_weight_gradient(recipe, gate_up, tiles, dh, x_PD)
    copies = recipe.quantise(source_ND, tiles, "tokens", columns=True, index_R=index_R)
    return fp8_weight_gradient(recipe, gate_up, tiles, dh, copies.wanted_columns)


def in_tiles(recipe: Fp8Experts, source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None = None) -> Tensor:
    """x_PD, unquantised."""
    one_N1 = torch.ones(len(source_ND), 1, device=source_ND.device)
    return recipe.kernels[gather_tiles](source_ND, one_N1, tiles, index_R).values


def fp8_weight_gradient(
    recipe: Fp8Experts, weight: Tensor, tiles: RowTiles, left: Quantised, right: Quantised
) -> Tensor | None:
    multiply = recipe.kernels[fp8_weight_product]
    return write_weight_gradient(weight, partial(multiply, left, right, tiles, recipe.weight_sums))


def plain_weight_gradient(
    recipe: Fp8Experts, weight: Tensor, tiles: RowTiles, left_PN: Tensor, right_PD: Tensor
) -> Tensor | None:
    multiply = recipe.kernels[tile_weight_product]
    return write_weight_gradient(weight, partial(multiply, left_PN, right_PD, tiles))


def write_weight_gradient(weight: Tensor, multiply: Callable[[Tensor, bool], None]) -> Tensor | None:
    """The gradient of a weight; or None if it was added, unrounded, to the sum in the weight's sink."""
    total = running_gradient_sum(weight)
    out = memory_for_gradient(weight) if total is None else total
    matrices = out.view(len(out), -1, out.shape[-1])
    multiply(matrices, total is not None)
    return out if total is None else None
