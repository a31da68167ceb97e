"""The histories of all products of a model, from step to step: ranks agree on what a step saw, and it is recorded.

The ranks of a pipeline stage have the same products in the same order. Each rank has seen other rows, and other experts
or channels: one all-reduce for each set of ranks that share something takes the largest magnitudes over them, and one
sums the counts of saturated values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from moefold.layout.axes import Axis, World
from moefold.precision.delayed import DelayedFp8Recipe
from moefold.precision.operand_history import MaximaWindow, OperandHistory
from moefold.precision.recipes import named_products

RecordedWindow = tuple[DelayedFp8Recipe, MaximaWindow]


class ScaleHistories:
    """Empty for a model without delayed scales. What the step under way has seen lies in one tensor for each axis, of
    which windows have views."""

    def __init__(self, model: nn.Module, world: World):
        self.everyone = world.dp_cp_tp
        self.recipes: list[DelayedFp8Recipe] = []
        self.histories: list[OperandHistory] = []
        self.windows: dict[Axis, list[RecordedWindow]] = {}
        for product in named_products(model).values():
            if isinstance(product.recipe, DelayedFp8Recipe):
                self.add_recipe(product.recipe)
        self.seen = {axis: joined_memory(windows) for axis, windows in self.windows.items()}

    def add_recipe(self, recipe: DelayedFp8Recipe) -> None:
        self.recipes.append(recipe)
        for history in recipe.histories.values():
            self.histories.append(history)
            for window in history.windows:
                self.windows.setdefault(window.axis, []).append((recipe, window))

    @torch.no_grad()
    def begin_step(self) -> None:
        """Forget what passes since the last step have seen: validation, or a survey of the routing."""
        for seen in self.seen.values():
            seen.zero_()
        for history in self.histories:
            history.saturated_now.zero_()

    @torch.no_grad()
    def end_step(self, sound: Tensor) -> None:
        """Record the step in the histories, unless it was not `sound`."""
        if not self.recipes:
            return
        for axis, windows in self.windows.items():
            agreed = agree_on_maxima(self.seen[axis], axis)
            write_to_histories(windows, agreed, sound)
        self.add_saturated()
        for recipe in self.recipes:
            recipe.note_recorded()

    def add_saturated(self) -> None:
        counts = torch.cat([history.saturated_now for history in self.histories])
        counts = all_reduce_no_grad(counts, self.everyone)
        for history, count in zip(self.histories, counts, strict=True):
            history.saturated += count


def joined_memory(windows: Sequence[RecordedWindow]) -> Tensor:
    """One flat tensor for what all windows see of the step under way."""
    parts = [window.now for _, window in windows]
    flat = flattened(parts)
    sizes = [part.numel() for part in parts]
    for (_, window), part in zip(windows, flat.split(sizes), strict=True):
        window.now = part.view_as(window.now)
    return flat


def agree_on_maxima(seen: Tensor, axis: Axis) -> Tensor:
    """Over the ranks of the axis. What is not a number becomes infinite, which is above all numbers on every backend;
    the scale of the next step is then NaN."""
    numbers = seen.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return all_reduce_max_no_grad(numbers, axis)


def write_to_histories(windows: Sequence[RecordedWindow], agreed: Tensor, sound: Tensor) -> None:
    """In the place of the oldest step."""
    oldest = [window.last[recipe.next_place] for recipe, window in windows]
    written = torch.where(sound, agreed, flattened(oldest))
    sizes = [place.numel() for place in oldest]
    for place, values in zip(oldest, written.split(sizes), strict=True):
        place.copy_(values.view_as(place))


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
