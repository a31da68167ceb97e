"""FP8 recipes: operands of E4M3 bytes (gradients E5M2 on request) with the scales that config/precision_recipes.py
states.

Rows of an input or a gradient lie in tiles of 128, each expert's apart (kernels/quantise/row_tiles.py); a dense layer
is one expert. Forward and data gradient read them along rows, the weight gradient reads a second copy along columns,
which is what forward saves: half of the bytes of bf16. Weights are quantised once, in both layouts, and kept until
they move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from moefold.config.precision_recipes import RecipeSpec, Sums
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.linear.fp8_product import fp8_product, fp8_weight_product
from moefold.kernels.linear.linear import FUSED_DGRAD_PRODUCTS, GroupedGemms, GroupedProducts
from moefold.kernels.linear.product import ExpertRows, KeptOperand, Operand, Products, Role, ends_of_rows
from moefold.kernels.quantise.fp8 import E4M3, E5M2, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles, Scales, TileMaxima, quantise_tiles, tile_maxima
from moefold.kernels.quantise.quantise_weight import QuantisedWeight, WeightFormat, quantise_weight
from moefold.kernels.quantise.row_tiles import RowTiles, row_tiles
from moefold.kernels.quantise.wide_scales import WideKind, WideScales, wide_scales
from moefold.layout.declare import PartOfTensor
from moefold.layout.gradient_sink import memory_for_gradient
from moefold.layout.weight_copies import cached_copy
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
        source = self.source if self.columns is None else None
        return self._replace(source=source, rows=None)


class Fp8Recipe:
    """One FP8 recipe with its options and current scales, for all products that use it: the only thing it keeps are
    copies of weights, and these are attributes of the weights. `watch` is shown every copy that it makes
    (precision/operand_statistics.py gives products a watch of their own)."""

    keeps: KeptOperand = "columns"
    rounds_by_token = False

    def __init__(self, spec: RecipeSpec, options: PrecisionConfig, kernels: BoundKernels):
        bound = kernels.with_facts(recipe=spec.name)
        self.spec = spec
        self.name = spec.name
        self.row_multiple = spec.row_multiple
        self.rule = ScaleRule(E4M3, options.power_of_two_scales)
        assert spec.weight in ("block", "expert", "channel"), f"{spec.name} does not quantise weights to FP8"
        self.weight_format = WeightFormat(spec.weight, self.rule)
        gradient_rule = ScaleRule(FORMATS[options.gradient_format], options.power_of_two_scales)
        self.rules: dict[Role, ScaleRule] = {"tokens": self.rule, "input": self.rule, "gradient": gradient_rule}
        self.kernels = bound
        self.row_sums: Sums = spec.row_sums(options.accumulate)
        self.weight_sums: Sums = spec.weight_sums
        self.products: Products | None = TileProducts(self.row_sums, self.weight_sums, bound)
        self.watch = OperandWatch(bound)

    def input(self, x: Tensor, rows: ExpertRows | None) -> TileOperand:
        are_tokens = rows is not None and rows.are_tokens
        return self.quantise_rows(x, rows, "tokens" if are_tokens else "input")

    def gradient(self, dy: Tensor, rows: ExpertRows | None, number_R: Tensor | None = None) -> TileOperand:
        return self.quantise_rows(dy, rows, "gradient")

    def weight(self, w: Tensor) -> QuantisedWeight:
        copies = cached_copy(w, self.weight_format, self.quantise_matrices)
        self.watch.see_weight(w, copies)
        return copies

    def state(self) -> Mapping[str, Tensor | PartOfTensor]:
        return {}

    def quantise_matrices(self, w: Tensor) -> QuantisedWeight:
        """Both layouts of a weight (N, D) or (E, N, D)."""
        w_END = w.detach().view(-1, *w.shape[-2:])
        return self.kernels[quantise_weight](w_END, *self.weight_format)

    def quantise_rows(self, x: Tensor, rows: ExpertRows | None, role: Role) -> TileOperand:
        """Both copies of an input or a gradient (R, D), or the first alone where the weight gradient reads x itself."""
        tiles = self.kernels[row_tiles](ends_of_rows(x, rows), len(x))
        filled = x if len(x) else x.new_zeros(1, x.shape[1])  # tiles without rows still name a first row
        fp8_wgrad = self.spec.columns != "none"
        copies = self.quantise(filled, tiles, role, rows=True, columns=fp8_wgrad)
        return TileOperand(tiles, x, copies.rows, copies.columns)

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
        row_scales, column_scales = self.current_scales(x, tiles, role, index_R)
        row_scales = row_scales if rows else None
        column_scales = column_scales if columns else None
        copies = self.kernels[quantise_tiles](x, tiles, self.rules[role], row_scales, column_scales, index_R)
        self.watch.see_rows(role, x, tiles, copies, index_R)
        return copies

    def show_rows(self, x: Tensor, tiles: RowTiles) -> None:
        """Show the watch the copy along rows that an epilogue made of an input, from the input itself."""
        if self.watch.seen is not None:
            copies = self.kernels[quantise_tiles](x, tiles, self.rules["input"], "block")
            self.watch.note_rows("input", x, tiles, copies)

    def current_scales(self, x: Tensor, tiles: RowTiles, role: Role, index_R: Tensor | None) -> tuple[Scales, Scales]:
        """What `quantise_tiles` takes: scales along rows and along columns, from the values themselves."""
        if self.spec.rows == "block":
            return "block", "block"
        maxima = self.kernels[tile_maxima](x, tiles, index_R)
        return self.scales_from_maxima(maxima, tiles, role)

    def scales_from_maxima(self, maxima: TileMaxima, tiles: RowTiles, role: Role) -> WideScales:
        wide_role: WideKind = "tensor" if role == "tokens" else "expert"
        kind: WideKind = "row" if self.spec.rows == "row" else wide_role
        return self.kernels[wide_scales](maxima, tiles, kind, self.rules[role])


class TileProducts:
    """The products of operands in tiles, dense and grouped alike. Weights have both layouts, (E, N, D) and (E, D,
    N)."""

    def __init__(self, row_sums: Sums, weight_sums: Sums, kernels: BoundKernels):
        self.row_sums: Sums = row_sums
        self.weight_sums: Sums = weight_sums
        self.multiply_rows = kernels[fp8_product]
        self.multiply_columns = kernels[fp8_weight_product]
        self.gemms = GroupedGemms(kernels[grouped_gemm], kernels[grouped_gemm_weight])

    def forward(self, x: TileOperand, w: QuantisedWeight, bias: Tensor | None) -> Tensor:
        y_RN = self.product(x, w.forward)
        if bias is None:
            return y_RN
        return y_RN + bias.to(y_RN.dtype)

    def data(self, dy: TileOperand, w: QuantisedWeight, into: Tensor | None) -> Tensor:
        dx_RD = self.product(dy, w.transposed)
        if into is None:
            return dx_RD
        return into.add_(dx_RD)

    def product(self, a: TileOperand, b: Quantised) -> Tensor:
        assert a.source is not None, "an operand of the weight gradient alone"
        assert a.rows is not None, "an operand of the weight gradient alone"
        return self.multiply_rows(a.rows, b, a.tiles, len(a.source), self.row_sums, a.source.dtype)

    def weight(self, dy: TileOperand, x: TileOperand, weight: Tensor) -> Tensor | None:
        if dy.columns is None or x.columns is None:
            return self.plain_weight(dy, x, weight)
        gradient = memory_for_gradient(weight)
        out_END = gradient.view(-1, *gradient.shape[-2:])
        self.multiply_columns(dy.columns, x.columns, dy.tiles, self.weight_sums, out_END)
        return gradient

    def plain_weight(self, dy: TileOperand, x: TileOperand, weight: Tensor) -> Tensor | None:
        """The weight gradient in the model's own precision."""
        assert dy.source is not None, "neither a copy along columns nor the source"
        assert x.source is not None, "neither a copy along columns nor the source"
        is_dense = weight.dim() == 2
        products = FUSED_DGRAD_PRODUCTS if is_dense else GroupedProducts(self.gemms, dy.tiles.ends_E)
        return products.weight(Operand(dy.source), Operand(x.source), weight)
