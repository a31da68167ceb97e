"""FP8 recipes: operands of E4M3 bytes (gradients E5M2 on request) with the scales that config/precision_recipes.py
states.

Rows of an input or a gradient lie in tiles of 128, each expert's apart (kernels/quantise/row_tiles.py); a dense layer
is one expert. Forward and data gradient read them along rows, the weight gradient reads a second copy along columns,
which is what forward saves: half of the bytes of bf16. Weights are quantised once, in both layouts, and kept until
they move.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefold.config.precision_recipes import RecipeSpec, Sums
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.fp8_product import fp8_product, fp8_weight_product
from moefold.kernels.linear.linear import FUSED_DGRAD_PRODUCTS, GroupedGemms, GroupedProducts
from moefold.kernels.linear.product import ExpertRows, KeptOperand, Operand, Products, Role
from moefold.kernels.quantise.delayed_tiles import DelayedScales, DelayedTiles
from moefold.kernels.quantise.fp8 import E4M3, E5M2, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles, Scales, TileMaxima, quantise_tiles, tile_maxima
from moefold.kernels.quantise.quantise_weight import QuantisedWeight, WeightFormat, quantise_weight
from moefold.kernels.quantise.row_tiles import RowTiles, TileSample, dense_tiles, row_tiles
from moefold.kernels.quantise.wide_scales import WideKind, WideScales, repeat_for_rows, wide_scales
from moefold.layout.gradient_sink import memory_for_gradient
from moefold.layout.weight_copies import cached_copy
from moefold.precision.linear import RecipeTensors
from moefold.precision.operand_watch import OperandWatch

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


class TileOperand(NamedTuple):
    """An input or a gradient in tiles of 128 rows. `source` is the tensor that was quantised, (R, D). `rows`: values
    (P, D). `columns`: values (M, D, 128); None where the weight gradient reads the source."""

    tiles: RowTiles
    source: Tensor | None
    rows: Quantised | None
    columns: Quantised | None

    def along_columns(self) -> TileOperand:
        """The operand of the weight gradient."""
        without_rows = self._replace(rows=None)
        if self.columns is None:
            return without_rows
        return without_rows._replace(source=None)


class Fp8Recipe:
    """One FP8 recipe with its options and current scales, for all products that use it: the only thing it keeps are
    copies of weights, and these are attributes of the weights. `watch` is shown every copy that it makes
    (precision/operand_statistics.py gives products a watch of their own)."""

    keeps: KeptOperand = "columns"
    rounds_by_token = False

    def __init__(self, spec: RecipeSpec, options: PrecisionConfig, kernels: BoundKernels):
        assert spec.weight in ("block", "expert", "channel"), f"{spec.name} does not quantise weights to FP8"
        bound = kernels.with_facts(recipe=spec.name)
        self.spec = spec
        self.name = spec.name
        self.kernels = bound
        self.row_multiple = spec.row_multiple
        self.row_sums: Sums = spec.row_sums(options.accumulate)
        self.weight_sums: Sums = spec.weight_sums
        products = TileProducts(self.row_sums, self.weight_sums, bound)
        self.products: Products | None = products
        self.watch = OperandWatch(bound)
        # Rules of scales
        power_of_two = options.power_of_two_scales
        gradient_format = FORMATS[options.gradient_format]
        rule = ScaleRule(E4M3, power_of_two)
        self.rule = rule
        self.rules: dict[Role, ScaleRule] = {}
        self.rules["tokens"] = rule
        self.rules["input"] = rule
        self.rules["gradient"] = ScaleRule(gradient_format, power_of_two)
        self.weight_format = WeightFormat(spec.weight, rule)

    @property
    def input_maker(self) -> object:
        return self

    def input(self, x: Tensor, rows: ExpertRows | None) -> TileOperand:
        role: Role = "input"
        if rows is not None and rows.are_tokens:
            role = "tokens"
        return self.quantise_rows(x, rows, role)

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> TileOperand:
        return self.quantise_rows(dy, rows, "gradient")

    def weight(self, w: Tensor) -> QuantisedWeight:
        format = self.weight_format
        copies = cached_copy(w, format, self.quantise_matrices)
        self.watch.see_weight(w, copies)
        return copies

    def state(self) -> RecipeTensors:
        return {}

    def quantise_matrices(self, w: Tensor) -> QuantisedWeight:
        """Both layouts of a weight (N, D) or (E, N, D)."""
        w_END = as_stack(w.detach())
        scales, rule = self.weight_format
        quantise = self.kernels[quantise_weight]
        return quantise(w_END, scales, rule)

    def quantise_rows(self, x: Tensor, rows: ExpertRows | None, role: Role) -> TileOperand:
        """Both copies of an input or a gradient (R, D), or the first alone where the weight gradient reads x itself."""
        count, width = x.shape
        make_tiles = self.kernels[row_tiles]
        tiles = dense_tiles(make_tiles, x) if rows is None else make_tiles(rows.ends_E, count)
        source = x
        if count == 0:
            source = x.new_zeros(1, width)  # tiles without rows still name a first row
        fp8_wgrad = self.spec.columns != "none"
        by_row, by_column = self.quantise(source, tiles, role, rows=True, columns=fp8_wgrad)
        return TileOperand(tiles, x, by_row, by_column)

    def quantise(
        self,
        x: Tensor,
        tiles: RowTiles,
        role: Role,
        rows: bool = False,
        columns: bool = False,
        index_R: Tensor | None = None,
    ) -> QuantisedTiles:
        """Copies of rows in tiles along rows, along columns, or both, with the scales of this recipe."""
        rule = self.rules[role]
        of_rows: Scales = "block"
        of_columns: Scales = "block"
        if self.spec.rows != "block":
            find_maxima = self.kernels[tile_maxima]
            each_row = rows and self.spec.rows == "row"
            if role == "tokens" and self.spec.rows == "tensor" and index_R is not None:
                of_rows, of_columns = self.scale_of_tokens(x, tiles)
            else:
                maxima = find_maxima(x, tiles, index_R, each_row)
                of_rows, of_columns = self.scales_from_maxima(maxima, tiles, role)
        if not rows:
            of_rows = None
        if not columns:
            of_columns = None
        make_copies = self.kernels[quantise_tiles]
        copies = make_copies(x, tiles, rule, of_rows, of_columns, index_R)
        self.watch.see_rows(role, x, tiles, copies, index_R)
        return copies

    def delayed_scales(self, role: Role) -> DelayedScales | None:
        """Scales that are known before the values: none."""
        return None

    def take_note(self, role: Role, tiles: RowTiles, found: DelayedTiles) -> Tensor | None:
        """Of what was found where scales were delayed."""
        raise TypeError(f"{self.name} has current scales: no values are beyond their range")

    @property
    def scales_each_row(self) -> bool:
        """Whether the scales of a gradient's row, along rows, follow from this row alone."""
        return self.spec.rows in ("block", "row")

    @property
    def is_watched(self) -> bool:
        """Whether this step records statistics."""
        return self.watch.seen is not None

    def sample_of(self, tiles: RowTiles) -> TileSample:
        """The tiles that the watch is shown."""
        return self.watch.sample_of(tiles)

    def show_sample(
        self,
        role: Role,
        x: Tensor,
        tiles: RowTiles,
        copies: QuantisedTiles,
        sample: TileSample,
        saturated: Tensor | None = None,
    ) -> None:
        """Show the watch a sample of the tiles of x, of which a fused kernel made copies."""
        if self.is_watched:
            self.watch.note_rows(role, x, tiles, copies, sample.factor, saturated=saturated)

    def show_rows(self, x: Tensor, tiles: RowTiles, sample: TileSample) -> None:
        """Show the watch the copy along rows that an epilogue made of an input, from the input itself."""
        if not self.is_watched:
            return
        rule = self.rules["input"]
        make_copies = self.kernels[quantise_tiles]
        copies = make_copies(x, tiles, rule, "block")
        self.watch.note_rows("input", x, tiles, copies, sample.factor)

    def scale_of_tokens(self, x: Tensor, tiles: RowTiles) -> WideScales:
        """The scale of all tokens, whether they have rows or not, for those that `tiles` gather: each is read once."""
        token_tiles = dense_tiles(self.kernels[row_tiles], x)
        find_maxima = self.kernels[tile_maxima]
        maxima = find_maxima(x, token_tiles, None, False)
        of_tokens = self.scales_from_maxima(maxima, token_tiles, "tokens")
        return spread_scale(of_tokens.columns_MD[:1, 0], tiles, x.shape[1])

    def scales_from_maxima(self, maxima: TileMaxima, tiles: RowTiles, role: Role) -> WideScales:
        """Current scales that are wider than a block, as `quantise_tiles` takes them."""
        kind: WideKind = "expert"
        if self.spec.rows == "row":
            kind = "row"
        elif role == "tokens":
            kind = "tensor"
        rule = self.rules[role]
        find_scales = self.kernels[wide_scales]
        return find_scales(maxima, tiles, kind, rule)


def spread_scale(scale_1: Tensor, tiles: RowTiles, width: int) -> WideScales:
    """One scale for all rows and columns."""
    scale_M1 = scale_1.expand(len(tiles.tiles_M4), 1)
    columns_MD = scale_M1.expand(-1, width).contiguous()
    return WideScales(repeat_for_rows(scale_M1), columns_MD)


def as_stack(w: Tensor) -> Tensor:
    """A view of a matrix (N, D), or of matrices (E, N, D), with the dim of experts."""
    matrix = w.shape[-2:]
    return w.view(-1, *matrix)


class TileProducts:
    """The products of operands in tiles, dense and grouped alike. Weights have both layouts, (E, N, D) and (E, D,
    N)."""

    def __init__(self, row_sums: Sums, weight_sums: Sums, kernels: BoundKernels):
        self.row_sums: Sums = row_sums
        self.weight_sums: Sums = weight_sums
        self.multiply_rows = kernels[fp8_product]
        self.multiply_columns = kernels[fp8_weight_product]
        multiply = kernels[grouped_gemm]
        multiply_for_weight = kernels[grouped_gemm_weight]
        self.gemms = GroupedGemms(multiply, multiply_for_weight)

    def forward(self, x: TileOperand, w: QuantisedWeight, bias: Tensor | None) -> Tensor:
        w_END = w.forward
        y_RN = self.product(x, w_END)
        if bias is None:
            return y_RN
        bias_N = bias.to(y_RN.dtype)
        return y_RN + bias_N

    def data(self, dy: TileOperand, w: QuantisedWeight, into: Tensor | None) -> Tensor:
        w_EDN = w.transposed
        dx_RD = self.product(dy, w_EDN)
        if into is None:
            return dx_RD
        return into.add_(dx_RD)

    def product(self, a: TileOperand, b: Quantised) -> Tensor:
        tiles, source, rows, _ = a
        assert source is not None, "an operand of the weight gradient alone"
        assert rows is not None, "an operand of the weight gradient alone"
        count = len(source)
        dtype = source.dtype
        return self.multiply_rows(rows, b, tiles, count, self.row_sums, dtype)

    def weight(self, dy: TileOperand, x: TileOperand, weight: Tensor) -> Tensor | None:
        left = dy.columns
        right = x.columns
        if left is None or right is None:
            return self.plain_weight(dy, x, weight)
        gradient = memory_for_gradient(weight)
        gradient_END = as_stack(gradient)
        sums = self.weight_sums
        self.multiply_columns(left, right, dy.tiles, sums, gradient_END)
        return gradient

    def plain_weight(self, dy: TileOperand, x: TileOperand, weight: Tensor) -> Tensor | None:
        """The weight gradient in the model's own precision."""
        assert dy.source is not None, "neither a copy along columns nor the source"
        assert x.source is not None, "neither a copy along columns nor the source"
        products: Products = FUSED_DGRAD_PRODUCTS
        if weight.dim() == 3:
            ends_E = dy.tiles.ends_E
            products = GroupedProducts(self.gemms, ends_E)
        left = Operand(dy.source)
        right = Operand(x.source)
        return products.weight(left, right, weight)
