"""Watch over the FP8 operands of a product: figures of every copy that a recorded step quantises.

A recipe shows its watch each copy of an input, a gradient or a weight; outside recorded steps the watch does nothing.
It looks at some tiles of a large copy, others in each recorded step, and at some outputs of a large weight; sums tell
of all values in proportion, extremes are those of the values looked at.
Figures stay on the device. They are shares and ratios, so that values that several ranks hold alike may be counted on
each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.product import Role
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles
from moefold.kernels.quantise.quantise_weight import QuantisedWeight
from moefold.kernels.quantise.rounding_figures import (
    CopyMatrices,
    RoundingFigures,
    matrices_of_columns,
    matrices_of_rows,
    matrices_of_weight,
    rounding_figures,
)
from moefold.kernels.quantise.row_tiles import RowTiles, TileSample, padded_index
from moefold.layout.gradient_sink import underlying_parameter
from moefold.layout.weight_copies import keeps_values
from moefold.observe.fp8_stats import OperandKind

IsRerun = Callable[[], bool]
MOST_TILES = 32  # of a copy
MOST_EXPERTS = 8  # of a weight
MOST_OUTPUTS = 512  # of an expert


class SeenCopy(NamedTuple):
    """Figures of one copy. `saturated`, (1,), counts both copies of an operand and is given with the first."""

    kind: OperandKind
    figures: RoundingFigures
    saturated: Tensor


def never() -> bool:
    return False


class OperandWatch:
    """The watch of one product, or of several that read one input. `is_rerun` tells whether a forward repeats one that
    was counted; `seen` is None outside recorded steps."""

    def __init__(self, kernels: BoundKernels, is_rerun: IsRerun = never):
        self.kernels = kernels
        self.is_rerun = is_rerun
        self.seen: list[SeenCopy] | None = None
        self.weights: set[int] = set()  # parameters that were seen in this step
        self.turn = 0  # of the recorded step: which tiles are looked at

    def begin(self, turn: int = 0) -> None:
        self.turn = turn
        self.seen = []
        self.weights.clear()

    def end(self) -> list[SeenCopy]:
        seen = self.seen or []
        self.seen = None
        return seen

    def see_rows(
        self,
        role: Role,
        x: Tensor,
        tiles: RowTiles,
        copies: QuantisedTiles,
        index_R: Tensor | None = None,
        saturated: Tensor | None = None,
    ) -> None:
        """Copies of an input or a gradient that a product reads."""
        if self.seen is None:
            return
        in_forward = role != "gradient" and copies.rows is not None  # columns alone are made in backward
        if in_forward and self.is_rerun():
            return
        sample = self.sample_of(tiles)
        few = sample.of_tiles(tiles)
        copies = copies.of_sample(sample)
        self.note_rows(role, x, few, copies, sample.factor, index_R, saturated)

    def sample_of(self, tiles: RowTiles) -> TileSample:
        """The tiles of a copy that are looked at."""
        count = len(tiles.tiles_M4)
        every = -(-count // MOST_TILES)
        return TileSample(self.turn % every, every, count)

    def note_rows(
        self,
        role: Role,
        x: Tensor,
        tiles: RowTiles,
        copies: QuantisedTiles,
        factor: float,
        index_R: Tensor | None = None,
        saturated: Tensor | None = None,
    ) -> None:
        kind: OperandKind = "gradient" if role == "gradient" else "activation"
        index_P = padded_index(tiles, index_R)
        for copy in matrices_of_copies(copies):
            self.note(kind, x, index_P, copy, factor, saturated)
            saturated = None

    def see_weight(self, w: Tensor, copies: QuantisedWeight) -> None:
        """Once a step, whatever the number of microbatches."""
        if self.seen is None or not keeps_values(w):
            return
        parameter = id(underlying_parameter(w))
        if parameter in self.weights:
            return
        self.weights.add(parameter)
        experts, outputs, _ = copies.forward.values.shape
        w_ND = w.detach().flatten(0, -2)
        numbers_EN = torch.arange(len(w_ND), device=w.device).view(experts, outputs)
        part = self.part_of_weight(experts, outputs)
        index_P = numbers_EN[part].flatten()
        factor = len(w_ND) / len(index_P)
        for values_ENC, scales_ENK in matrices_of_weight(copies):
            copy = CopyMatrices(values_ENC[part], scales_ENK[part])
            self.note("weight", w_ND, index_P, copy, factor)

    def part_of_weight(self, experts: int, outputs: int) -> tuple[slice, slice]:
        """The experts that are looked at, and the outputs of each."""
        every = -(-experts // MOST_EXPERTS)
        windows = -(-outputs // MOST_OUTPUTS)
        first = self.turn // every % windows * MOST_OUTPUTS  # when all experts have had their turn, other outputs
        return slice(self.turn % every, None, every), slice(first, first + MOST_OUTPUTS)

    def note(
        self,
        kind: OperandKind,
        source_ND: Tensor,
        index_P: Tensor,
        copy: CopyMatrices,
        factor: float,
        saturated: Tensor | None = None,
    ) -> None:
        assert self.seen is not None, "no step is recorded"
        find_figures = self.kernels[rounding_figures]
        figures = find_figures(source_ND, index_P, copy)
        if factor != 1:
            figures = figures._replace(sums_4=figures.sums_4 * factor)
        if saturated is None:
            saturated = torch.zeros(1, dtype=torch.int64, device=source_ND.device)
        seen = SeenCopy(kind, figures, saturated)
        self.seen.append(seen)


def matrices_of_copies(copies: QuantisedTiles) -> Iterator[CopyMatrices]:
    if copies.rows is not None:
        yield matrices_of_rows(copies.rows)
    if copies.columns is not None:
        yield matrices_of_columns(copies.columns)
