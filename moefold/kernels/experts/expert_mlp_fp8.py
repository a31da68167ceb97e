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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.config.precision_recipes import RecipeSpec, Sums
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.activation_formats import ActivationFormats
from moefold.kernels.experts.delayed_swiglu_tiles import GradientScales, quantise_delayed_gradient
from moefold.kernels.experts.fp8_swiglu import Kept, fp8_dswiglu_product, fp8_swiglu_product, swiglu_gradients
from moefold.kernels.experts.swiglu_tiles import GradientRules, QuantisedGradient, quantise_swiglu_gradient
from moefold.kernels.linear.fp8_product import fp8_product, fp8_weight_product, tile_weight_product
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.delayed_tiles import DelayedScales, DelayedTiles
from moefold.kernels.quantise.fp8 import Quantised, ScaleRule
from moefold.kernels.quantise.gather_tiles import gather_tiles
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles
from moefold.kernels.quantise.quantise_weight import QuantisedWeight
from moefold.kernels.quantise.row_tiles import RowTiles, TileSample, dense_tiles, pad_to_tiles, padded_tiles, row_tiles
from moefold.kernels.routing.expert_rows import sum_rows
from moefold.kernels.routing.gathered_rows import source_of_rows
from moefold.layout.deferred_wgrad import gradient_or_defer
from moefold.layout.gradient_sink import memory_for_gradient, running_gradient_sum
from moefold.layout.rerun import RERUN


class Fp8Experts(Protocol):
    """What the experts ask of an FP8 recipe (precision/fp8.py). The recipes of the two products are alike but for the
    scales that they keep."""

    spec: RecipeSpec
    rule: ScaleRule
    rules: dict[Role, ScaleRule]
    row_sums: Sums
    weight_sums: Sums
    kernels: BoundKernels

    @property
    def scales_each_row(self) -> bool:
        """Whether the scales of a gradient's row, along rows, follow from this row alone."""
        ...

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

    def delayed_scales(self, role: Role) -> DelayedScales | None:
        """Scales that are known before the values."""
        ...

    def take_note(self, role: Role, tiles: RowTiles, found: DelayedTiles) -> Tensor | None:
        """Of largest magnitudes and saturated values; the number of these, where they are counted."""
        ...

    @property
    def is_watched(self) -> bool:
        """Whether this step records statistics; what follows is for them alone."""
        ...

    def sample_of(self, tiles: RowTiles) -> TileSample:
        """The tiles that are shown."""
        ...

    def show_sample(
        self,
        role: Role,
        x: Tensor,
        tiles: RowTiles,
        copies: QuantisedTiles,
        sample: TileSample,
        saturated: Tensor | None = None,
    ) -> None:
        """Copies that a fused kernel made of x, which has the sample of tiles alone. `saturated`: of all tiles."""
        ...

    def show_rows(self, x: Tensor, tiles: RowTiles, sample: TileSample) -> None:
        """An input that an epilogue quantised along rows."""
        ...


class ExpertPass(NamedTuple):
    """What the products of one pass share: the recipes of the first and of the second product, the tiles of the rows,
    the number of rows without padding, and the model's own dtype."""

    recipe: Fp8Experts
    down_recipe: Fp8Experts
    tiles: RowTiles
    rows: int
    dtype: torch.dtype

    @property
    def kernels(self) -> BoundKernels:
        return self.recipe.kernels

    @property
    def by_blocks(self) -> bool:
        return self.recipe.spec.rows == "block"

    @property
    def fp8_wgrad(self) -> bool:
        return self.recipe.spec.columns != "none"

    @property
    def activation_scales(self) -> DelayedScales | None:
        """Those of a, where they are known before its values."""
        return self.down_recipe.delayed_scales("input")

    @property
    def delayed_scales(self) -> GradientScales | None:
        """Those of dh and of a, where they are known before their values."""
        dh = self.recipe.delayed_scales("gradient")
        a = self.activation_scales
        if dh is None or a is None:
            return None
        dh_rule = self.recipe.rules["gradient"]
        a_rule = self.down_recipe.rules["input"]
        return GradientScales(dh_rule, dh, a_rule, a)

    def multiply(self, a: Quantised, w: Quantised) -> Tensor:
        """Rows times weights, without padding."""
        product = self.kernels[fp8_product]
        sums = self.recipe.row_sums
        return product(a, w, self.tiles, self.rows, sums, self.dtype)


class KeptForBackward(NamedTuple):
    """What the gradient of the pre-activation follows from, beside dy."""

    down: Tensor
    h: Kept
    weight_R: Tensor


class Fp8ExpertMlp(torch.autograd.Function):
    """Weights are kept as the Parameter objects: their gradient sink and their FP8 copies are attributes."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Fp8Experts, down_recipe: Fp8Experts,
        source_ND, gate_up_E2FD, down_EDF, weight_R, index_R, slots_NK, ends_E,
    ):  # fmt: skip
        rows = len(index_R)
        find_tiles = recipe.kernels[row_tiles]
        tiles = find_tiles(ends_E, rows)
        work = ExpertPass(recipe, down_recipe, tiles, rows, source_ND.dtype)
        x = gather_tokens(work, source_ND, index_R)
        has_backward = any(ctx.needs_input_grad)
        h, a = up_product(work, x, gate_up_E2FD, weight_R, has_backward)
        del x
        if RERUN.uses_expert_outputs:
            y_RD = down_product(work, a, down_EDF)
        else:  # a rerun for the saved tensors alone
            width = source_ND.shape[1]
            y_RD = source_ND.new_empty(rows, width)
        kept = h if isinstance(h, Quantised) else (h, None)
        ctx.recipes = (recipe, down_recipe)
        ctx.weights = (gate_up_E2FD, down_EDF)
        routing = (weight_R, index_R, slots_NK)
        ctx.save_for_backward(source_ND, *routing, *kept, *tiles)
        return y_RD

    @staticmethod
    def backward(ctx: Any, dy_RD):
        source_ND, weight_R, index_R, slots_NK, *rest = ctx.saved_tensors
        h, h_scales, *tiles = rest
        del rest
        if h_scales is not None:
            h = Quantised(h, h_scales)
        tiles = RowTiles(*tiles)
        rows = len(index_R)
        recipe, down_recipe = ctx.recipes
        work = ExpertPass(recipe, down_recipe, tiles, rows, source_ND.dtype)
        gate_up, down = ctx.weights
        # Down: the data gradient and SwiGLU's, and the weight gradient.
        dy_rows, left = quantise_output_gradient(work, dy_RD)
        find_gradient = gradient_by_blocks if work.by_blocks else gradient_by_wide_scales
        if work.delayed_scales is not None:
            find_gradient = gradient_by_delayed_scales
        weight_fp32_R = weight_R.float()
        kept = KeptForBackward(down, h, weight_fp32_R)
        gradient = find_gradient(work, kept, dy_rows)
        dh_rows, dh, a, dweight_R = gradient
        del h, kept, gradient, dy_rows
        compute_down = partial(weight_gradient, work, down, left, a)
        ddown = gradient_or_defer(down, compute_down)
        del left, a, compute_down
        # Up: the data gradient summed over each source row's slots, and the weight gradient.
        w = up_weight(recipe, gate_up).transposed
        dx_RD = work.multiply(dh_rows, w)
        sum_over_slots = work.kernels[sum_rows]
        dsource_ND = sum_over_slots(dx_RD, index_R, slots_NK, True)
        del dx_RD, dh_rows
        compute_up = partial(up_weight_gradient, work, gate_up, dh, source_ND, index_R)
        dgate_up = gradient_or_defer(gate_up, compute_up)
        dweight_R = dweight_R.to(weight_R.dtype)
        gradients = (dsource_ND, dgate_up, ddown, dweight_R)
        return None, None, *gradients, None, None, None


def gather_tokens(work: ExpertPass, source_ND: Tensor, index_R: Tensor) -> Quantised:
    """Tokens quantised along their rows, once each, and their bytes in the experts' order."""
    return quantise_then_gather(work, work.recipe, source_ND, "tokens", index_R)


def quantise_then_gather(
    work: ExpertPass, recipe: Fp8Experts, source_ND: Tensor, role: Role, index_R: Tensor
) -> Quantised:
    source_tiles = dense_tiles(work.kernels[row_tiles], source_ND)
    sources = recipe.quantise(source_ND, source_tiles, role, rows=True)
    values, scales = sources.wanted_rows
    gather = work.kernels[gather_tiles]
    return gather(values, scales, work.tiles, index_R)


def quantise_output_gradient(work: ExpertPass, dy_RD: Tensor) -> tuple[Quantised, Kept]:
    """dy along rows for the data gradient, and what the weight gradient reads. Where rows are those of tokens and their
    scales depend on no other row, each token is quantised once."""
    recipe = work.down_recipe
    source_ND, index_R = source_of_rows(dy_RD)
    in_columns = work.fp8_wgrad
    quantise = partial(recipe.quantise, source_ND, work.tiles, "gradient", index_R=index_R)
    if index_R is None or not recipe.scales_each_row:
        copies = quantise(rows=True, columns=in_columns)
        rows, columns = copies.wanted_rows, copies.columns
    else:
        rows = quantise_then_gather(work, recipe, source_ND, "gradient", index_R)
        columns = quantise(columns=True).columns if in_columns else None
    if columns is None:
        return rows, in_tiles(work, source_ND, index_R)
    return rows, columns


def up_product(
    work: ExpertPass, x: Quantised, gate_up_E2FD: Tensor, weight_R: Tensor, has_backward: bool
) -> tuple[Kept, Kept]:
    """The pre-activation, as backward keeps it, and the activation: quantised in the epilogue where scales are known
    and backward takes note of largest magnitudes."""
    recipe = work.recipe
    w = up_weight(recipe, gate_up_E2FD).forward
    fp8_kept = work.fp8_wgrad
    formats = ActivationFormats(recipe.rule, work.by_blocks, fp8_kept, work.dtype)
    multiply = work.kernels[fp8_swiglu_product]
    weight_fp32_R = weight_R.float()
    sums = recipe.row_sums
    a_scales = work.activation_scales if has_backward else None
    a_rows_E1 = None if a_scales is None else a_scales.rows_E1
    return multiply(x, w, weight_fp32_R, work.tiles, sums, formats, a_rows_E1)


def up_weight(recipe: Fp8Experts, gate_up_E2FD: Tensor) -> QuantisedWeight:
    gate_up_END = gate_up_E2FD.flatten(1, 2)
    return recipe.weight(gate_up_END)


def down_product(work: ExpertPass, a: Kept, down_EDF: Tensor) -> Tensor:
    """y_RD from the activation, quantised by the product before it or here."""
    recipe = work.down_recipe
    if isinstance(a, Tensor):
        padded = padded_tiles(work.tiles)
        a_copies = recipe.quantise(a, padded, "input", rows=True)
        a = a_copies.wanted_rows
    w = recipe.weight(down_EDF).forward
    return work.multiply(a, w)


def gradient_by_blocks(work: ExpertPass, kept: KeptForBackward, dy: Quantised) -> QuantisedGradient:
    """The gradient of the pre-activation: the data gradient of down, then one pass that quantises in blocks."""
    recipe = work.recipe
    down_recipe = work.down_recipe
    down, h, weight_R = kept
    w = down_recipe.weight(down).transposed
    da_RF = work.multiply(dy, w)
    dh_rule = recipe.rules["gradient"]
    a_rule = down_recipe.rule
    rules = GradientRules(dh_rule, a_rule, work.fp8_wgrad)
    quantise = work.kernels[quantise_swiglu_gradient]
    gradient = quantise(da_RF, h, weight_R, work.tiles, rules)
    if recipe.is_watched or down_recipe.is_watched:
        dh_columns = None if isinstance(gradient.dh, Tensor) else gradient.dh
        dh_copies = QuantisedTiles(gradient.rows, dh_columns)
        a = gradient.a if isinstance(gradient.a, Tensor) else QuantisedTiles(None, gradient.a)
        show_gradient(work, kept, da_RF, GradientCopies(dh_copies, a))
    return gradient


class GradientCopies(NamedTuple):
    """What one pass quantised: the gradient of the pre-activation, and the activation or what stands for it in the
    model's own precision; with the values that were beyond the range of delayed scales."""

    dh: QuantisedTiles
    a: QuantisedTiles | Tensor
    dh_saturated: Tensor | None = None
    a_saturated: Tensor | None = None


def show_gradient(work: ExpertPass, kept: KeptForBackward, da_RF: Tensor, made: GradientCopies) -> None:
    """For statistics: a sample of the values that the pass quantised."""
    recipe, down_recipe, tiles, _, _ = work
    sample = recipe.sample_of(tiles)
    few = sample.of_tiles(tiles)
    _, h, weight_R = kept
    h = sample.of_rows(h) if isinstance(h, Tensor) else Quantised(*map(sample.of_rows, h))
    da_PF = pad_to_tiles(da_RF, few)
    exact = swiglu_gradients(da_PF, h, weight_R, few)
    padded = padded_tiles(few)
    dh = made.dh.of_sample(sample)
    recipe.show_sample("gradient", exact.dh_PN, padded, dh, sample, made.dh_saturated)
    if isinstance(made.a, Tensor):
        down_recipe.show_rows(sample.of_rows(made.a), padded, sample)
    else:
        a = made.a.of_sample(sample)
        down_recipe.show_sample("input", exact.a_PF, padded, a, sample, made.a_saturated)


def gradient_by_wide_scales(work: ExpertPass, kept: KeptForBackward, dy: Quantised) -> QuantisedGradient:
    """The same where a scale spans several tiles: SwiGLU's gradient in the product's epilogue, then quantised."""
    recipe, down_recipe, tiles, _, dtype = work
    down, h, weight_R = kept
    w = down_recipe.weight(down).transposed
    multiply = work.kernels[fp8_dswiglu_product]
    sums = recipe.row_sums
    gradients = multiply(dy, w, h, weight_R, tiles, sums, dtype)
    dh_PN, a_PF, dweight_R = gradients
    padded = padded_tiles(tiles)
    a_copies = down_recipe.quantise(a_PF, padded, "input", columns=True)
    a = a_copies.wanted_columns
    dh_copies = recipe.quantise(dh_PN, padded, "gradient", rows=True, columns=True)
    rows = dh_copies.wanted_rows
    dh = dh_copies.wanted_columns
    return QuantisedGradient(rows, dh, a, dweight_R)


def gradient_by_delayed_scales(work: ExpertPass, kept: KeptForBackward, dy: Quantised) -> QuantisedGradient:
    """The same where scales are known: the data gradient of down, then one pass that quantises once."""
    recipe, down_recipe, tiles, _, _ = work
    down, h, weight_R = kept
    scales = work.delayed_scales
    assert scales is not None, "a step has been recorded"
    w = down_recipe.weight(down).transposed
    da_RF = work.multiply(dy, w)
    quantise = work.kernels[quantise_delayed_gradient]
    dh, a, dweight_R = quantise(da_RF, h, weight_R, tiles, scales)
    dh_saturated = recipe.take_note("gradient", tiles, dh)
    a_saturated = down_recipe.take_note("input", tiles, a)
    if recipe.is_watched or down_recipe.is_watched:
        made = GradientCopies(dh.copies, a.copies, dh_saturated, a_saturated)
        show_gradient(work, kept, da_RF, made)
    dh_rows = dh.copies.wanted_rows
    dh_columns = dh.copies.wanted_columns
    a_columns = a.copies.wanted_columns
    return QuantisedGradient(dh_rows, dh_columns, a_columns, dweight_R)


def up_weight_gradient(
    work: ExpertPass,
    gate_up: Tensor,
    dh: Kept,
    source_ND: Tensor,
    index_R: Tensor,
) -> Tensor | None:
    """Gathers the tokens when it is called: a deferred gradient holds the source rows only."""
    if isinstance(dh, Tensor):
        x_PD = in_tiles(work, source_ND, index_R)
        return weight_gradient(work, gate_up, dh, x_PD)
    quantise = work.recipe.quantise
    copies = quantise(source_ND, work.tiles, "tokens", columns=True, index_R=index_R)
    x = copies.wanted_columns
    return weight_gradient(work, gate_up, dh, x)


def in_tiles(work: ExpertPass, source_ND: Tensor, index_R: Tensor | None = None) -> Tensor:
    """x_PD, unquantised."""
    rows = len(source_ND)
    one_N1 = torch.ones(rows, 1, device=source_ND.device)
    gather = work.kernels[gather_tiles]
    gathered = gather(source_ND, one_N1, work.tiles, index_R)
    return gathered.values


def weight_gradient(work: ExpertPass, weight: Tensor, left: Kept, right: Kept) -> Tensor | None:
    """From copies along columns, or from rows as they are."""
    tiles = work.tiles
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor), "one operand of two is quantised"
        product = work.kernels[tile_weight_product]
        multiply = partial(product, left, right, tiles)
    else:
        assert isinstance(right, Quantised), "one operand of two is quantised"
        product = work.kernels[fp8_weight_product]
        sums = work.recipe.weight_sums
        multiply = partial(product, left, right, tiles, sums)
    return write_weight_gradient(weight, multiply)


def write_weight_gradient(weight: Tensor, multiply: Callable[[Tensor, bool], None]) -> Tensor | None:
    """The gradient of a weight; or None if it was added, unrounded, to the sum in the weight's sink."""
    total = running_gradient_sum(weight)
    out = memory_for_gradient(weight) if total is None else total
    experts = len(out)
    width = out.shape[-1]
    matrices = out.view(experts, -1, width)
    multiply(matrices, total is not None)
    return out if total is None else None
