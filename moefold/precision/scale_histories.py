"""The histories of all products of a model, from step to step: ranks agree on what a step saw, and it is recorded.

The ranks of a pipeline stage have the same products in the same order. Each rank has seen other rows, and other experts
or channels: one all-reduce for each set of ranks that share something takes the largest magnitudes over them, and one
sums the counts of saturated values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from moefold.comm.host_copies import integers_on_device
from moefold.layout.axes import Axis, World
from moefold.layout.weight_copies import count_change
from moefold.precision.delayed import DelayedFp8Recipe
from moefold.precision.operand_history import MaximaWindow, OperandHistory
from moefold.precision.recipes import named_products

Tensors = Sequence[Tensor]


class ScaleHistories:
    """Empty for a model without delayed scales. `places`: of each recipe, the place in its histories of the step under
    way, on the device. `agreed`: the windows of all histories, by the axis whose ranks agree on them."""

    def __init__(self, model: nn.Module, world: World):
        self.everyone = world.dp_cp_tp
        self.recipes = delayed_recipes(model)
        self.histories: list[OperandHistory] = []
        self.agreed: dict[Axis, AgreedWindows] = {}
        count = len(self.recipes)
        self.places = torch.zeros(count, dtype=torch.int64, device=world.device)
        for number, recipe in enumerate(self.recipes):
            end = number + 1
            place = self.places[number:end]
            for history in recipe.histories.values():
                self.add_history(history, place)
        for windows in self.agreed.values():
            windows.join_memory()

    def add_history(self, history: OperandHistory, place: Tensor) -> None:
        self.histories.append(history)
        for window in history.windows:
            axis = window.axis
            if axis not in self.agreed:
                self.agreed[axis] = AgreedWindows(axis)
            agreed = self.agreed[axis]
            recorded = RecordedWindow(window, place)
            agreed.windows.append(recorded)

    def write_places(self) -> None:
        """Write the places of the next step to the device; they may differ where a recipe is new in a resumed run."""
        if not self.recipes:
            return
        places = [recipe.next_place for recipe in self.recipes]
        device = self.places.device
        on_device = integers_on_device(places, device)
        self.places.copy_(on_device, non_blocking=True)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Forget what passes since the last step have seen: validation, or a survey of the routing."""
        for windows in self.agreed.values():
            windows.seen.zero_()
        for history in self.histories:
            history.saturated_now.zero_()

    @torch.no_grad()
    def record_step(self, sound: Tensor) -> None:
        """Record the step in the histories, in the places that were written for it, unless it was not `sound`."""
        if not self.recipes:
            return
        for windows in self.agreed.values():
            windows.record(sound)
        self.add_saturated()

    def note_recorded(self) -> None:
        """Count a step whose maxima the device has written, or will have."""
        for recipe in self.recipes:
            recipe.note_recorded()
        self.forget_scales()

    def forget_scales(self) -> None:
        """Let scales be made anew from the histories when they are next asked for."""
        for history in self.histories:
            changed = [window.last for window in history.windows]
            count_change(changed)

    def add_saturated(self) -> None:
        counts_here = [history.saturated_now for history in self.histories]
        joined = torch.cat(counts_here)
        counts = all_reduce_no_grad(joined, self.everyone)
        for history, count in zip(self.histories, counts, strict=True):
            history.saturated += count


def delayed_recipes(model: nn.Module) -> list[DelayedFp8Recipe]:
    recipes: list[DelayedFp8Recipe] = []
    products = named_products(model)
    for product in products.values():
        recipe = product.recipe
        if isinstance(recipe, DelayedFp8Recipe):
            recipes.append(recipe)
    return recipes


class RecordedWindow(NamedTuple):
    """A window of a recipe, and the place in it of the step under way: (1,), on the device."""

    window: MaximaWindow
    place: Tensor

    def oldest_step(self) -> Tensor:
        """What the place of the step under way holds, (1, ...)."""
        last = self.window.last
        return last.index_select(0, self.place)

    def write(self, one_step: Tensor) -> None:
        last = self.window.last
        last.index_copy_(0, self.place, one_step)


class AgreedWindows:
    """The windows on which the ranks of one axis agree. What the step under way has seen lies in one flat tensor, of
    which windows have views."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.windows: list[RecordedWindow] = []
        self.seen = torch.empty(0)

    def join_memory(self) -> None:
        parts = [recorded.window.now for recorded in self.windows]
        self.seen = flattened(parts)
        views = split_as(self.seen, parts)
        for recorded, view in zip(self.windows, views, strict=True):
            recorded.window.now = view

    def record(self, sound: Tensor) -> None:
        """Write what all ranks have seen in the place of the oldest step, unless the step was not `sound`."""
        agreed = agree_on_maxima(self.seen, self.axis)
        oldest = [recorded.oldest_step() for recorded in self.windows]
        flat_oldest = flattened(oldest)
        written = torch.where(sound, agreed, flat_oldest)
        parts = split_as(written, oldest)
        for recorded, one_step in zip(self.windows, parts, strict=True):
            recorded.write(one_step)


def agree_on_maxima(seen: Tensor, axis: Axis) -> Tensor:
    """Over the ranks of the axis. What is not a number becomes infinite, which is above all numbers on every backend;
    the scale of the next step is then NaN."""
    numbers = seen.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return all_reduce_max_no_grad(numbers, axis)


def flattened(tensors: Tensors) -> Tensor:
    flat = [tensor.flatten() for tensor in tensors]
    return torch.cat(flat)


def split_as(flat: Tensor, tensors: Tensors) -> Iterator[Tensor]:
    """Views of a flat tensor, of the shapes that were flattened."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat.split(sizes)
    for part, tensor in zip(parts, tensors, strict=True):
        yield part.view_as(tensor)
