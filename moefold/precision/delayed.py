"""FP8 with delayed scales: an operand's scales come from the last steps, so that the values may be quantised where they
are made, before their own largest magnitude is known.

Tokens are quantised before they are gathered and keep current scales. With `fp8_row`, rows have the scale of their
expert, since the magnitude of a row is known only when the row is complete; channels have their own. Until a step has
been recorded, all scales are current.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.precision_recipes import RecipeSpec
from moefold.config.run import PrecisionConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.delayed_tiles import DelayedScales, DelayedTiles, note_maxima, quantise_delayed
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles, TileMaxima
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.quantise.wide_scales import WideScales
from moefold.layout.rerun import rerun_key
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.linear import PlacedWeight, RecipeTensors
from moefold.precision.operand_history import OperandHistory


class DelayedFp8Recipe(Fp8Recipe):
    """The recipe of one product. `recorded_H`: for each place of the histories the number of the step that it holds, 0
    for none; on the host, which chooses by it."""

    def __init__(
        self,
        spec: RecipeSpec,
        options: PrecisionConfig,
        kernels: BoundKernels,
        weight: PlacedWeight,
        reads_tokens: bool = False,
    ):
        super().__init__(spec, options, kernels)
        roles: list[Role] = ["input", "gradient"]
        if reads_tokens:
            roles = ["gradient"]
        by_channel = spec.columns == "channel"
        self.histories: dict[Role, OperandHistory] = {}
        for role in roles:
            self.histories[role] = OperandHistory(weight, role, options, self.rules[role], by_channel)
        self.recorded_H = torch.zeros(options.history, dtype=torch.int64, device="cpu")

    @property
    def steps(self) -> int:
        """How many were recorded."""
        recorded = self.recorded_H.numpy()
        return int(recorded.max())

    @property
    def next_place(self) -> int:
        """The place in the histories of the step under way: that of the oldest step."""
        return self.steps % len(self.recorded_H)

    @property
    def input_maker(self) -> object:
        """The history of inputs, which recipes of one input share."""
        return self.histories.get("input", self)

    def could_read_input_of(self, other: DelayedFp8Recipe) -> bool:
        """Whether the histories of inputs of both recipes are alike."""
        mine, its = self.histories["input"], other.histories["input"]
        return self.spec == other.spec and mine.describes_as(its)

    def read_input_of(self, other: DelayedFp8Recipe) -> None:
        """From now on, have the history of inputs of another recipe, of a product that reads the same."""
        self.histories["input"] = other.histories["input"]

    @property
    def scales_each_row(self) -> bool:
        """A gradient's scales are those of its expert."""
        return False

    def note_recorded(self) -> None:
        """The step under way was written to its place."""
        self.recorded_H[self.next_place] = self.steps + 1

    def state(self) -> RecipeTensors:
        kept: RecipeTensors = {}
        kept["recorded_steps"] = self.recorded_H
        for role, history in self.histories.items():
            for kind, tensor in history.state().items():
                kept[f"{role}_{kind}"] = tensor
        return kept

    def quantise(
        self,
        x: Tensor,
        tiles: RowTiles,
        role: Role,
        rows: bool = False,
        columns: bool = False,
        index_R: Tensor | None = None,
    ) -> QuantisedTiles:
        scales = self.delayed_scales(role)
        if scales is None:
            return super().quantise(x, tiles, role, rows, columns, index_R)
        rule = self.rules[role]
        make_copies = self.kernels[quantise_delayed]
        found = make_copies(x, tiles, rule, scales, rows, columns, index_R)
        saturated = self.take_note(role, tiles, found)
        self.watch.see_rows(role, x, tiles, found.copies, index_R, saturated)
        return found.copies

    def delayed_scales(self, role: Role) -> DelayedScales | None:
        """Those of the last steps, if any were recorded."""
        history = self.histories.get(role)
        if history is None or self.steps == 0:
            return None
        return history.scales()

    def take_note(self, role: Role, tiles: RowTiles, found: DelayedTiles) -> Tensor | None:
        """Of largest magnitudes and saturated values; the number of these, where they are counted."""
        history = self.histories[role]
        self.record(history, found.maxima_MD, tiles)
        if rerun_key() is not None:  # its values were counted
            return None
        history.saturated_now += found.saturated_1
        return found.saturated_1

    def scales_from_maxima(self, maxima: TileMaxima, tiles: RowTiles, role: Role) -> WideScales:
        """Current scales: of tokens, and of all until a step has been recorded."""
        history = self.histories.get(role)
        if history is not None:
            self.record(history, maxima.columns_MD, tiles)
        return super().scales_from_maxima(maxima, tiles, role)

    def record(self, history: OperandHistory, maxima_MD: Tensor, tiles: RowTiles) -> None:
        """Take note of largest magnitudes in the step under way."""
        take_note = self.kernels[note_maxima]
        take_note(maxima_MD, tiles, *history.seen_now())
