"""The histories of all products of a model, from step to step: ranks agree on what a step saw, and it is recorded.

The ranks of a pipeline stage have the same products in the same order. Each rank has seen other rows, and other experts
or channels: one all-reduce for each set of ranks that share something takes the largest magnitudes over them, and one
sums the counts of saturated values. All windows lie side by side, so that a step takes few launches, however many
products there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from moefold.comm.host_copies import integers_on_device
from moefold.layout.axes import Axis, World
from moefold.layout.weight_copies import count_change
from moefold.precision.delayed import DelayedFp8Recipe
from moefold.precision.maxima_windows import JoinedWindows, MaximaWindow
from moefold.precision.operand_history import OperandHistory
from moefold.precision.recipes import named_products
from moefold.precision.scale_table import ScaleTable, TableKind


class ScaleHistories:
    """Empty for a model without delayed scales. `places`: of each recipe, the place in its histories of the step under
    way, on the device. `agreed`: the windows of all histories, by the axis whose ranks agree on them. `saturated` and
    `saturated_now` have the counts of all histories."""

    def __init__(self, model: nn.Module, world: World):
        self.everyone = world.dp_cp_tp
        self.recipes = delayed_recipes(model)
        count = len(self.recipes)
        self.places = torch.zeros(count, dtype=torch.int64, device=world.device)
        by_kind = defaultdict[TableKind, list[OperandHistory]](list)
        recipe_of: dict[MaximaWindow, int] = {}
        for number, recipe in enumerate(self.recipes):
            for history in recipe.histories.values():
                if history.experts not in recipe_of:  # several recipes may share that of their input
                    by_kind[history.kind].append(history)
                    recipe_of |= dict.fromkeys(history.windows, number)
        self.histories = list(chain.from_iterable(by_kind.values()))  # those of a table are neighbours
        by_axis = defaultdict[Axis, list[MaximaWindow]](list)
        for history in self.histories:
            for window in history.windows:
                by_axis[window.axis].append(window)
        self.agreed: list[AgreedWindows] = []
        for axis, windows in by_axis.items():
            recipes = [recipe_of[window] for window in windows]
            self.agreed.append(AgreedWindows(axis, windows, recipes))
        for kind, histories in by_kind.items():
            join_table(kind, histories)
        self.join_counts(world.device)

    def join_counts(self, device: torch.device) -> None:
        """Let the histories' counts be views of two tensors."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.saturated = torch.cat([none, *(history.saturated for history in self.histories)])
        self.saturated_now = torch.zeros_like(self.saturated)
        for number, history in enumerate(self.histories):
            history.saturated = self.saturated[number : number + 1]
            history.saturated_now = self.saturated_now[number : number + 1]

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
        if not self.recipes:
            return
        for windows in self.agreed:
            windows.now_T.zero_()
        self.saturated_now.zero_()

    @torch.no_grad()
    def record_step(self, sound: Tensor) -> None:
        """Record the step in the histories, in the places that were written for it, unless it was not `sound`."""
        if not self.recipes:
            return
        for windows in self.agreed:
            windows.record(self.places, sound)
        counts = all_reduce_no_grad(self.saturated_now.clone(), self.everyone)
        self.saturated += counts

    def note_recorded(self) -> None:
        """Count a step whose maxima the device has written, or will have."""
        for recipe in self.recipes:
            recipe.note_recorded()
        self.forget_scales()

    def forget_scales(self) -> None:
        """Let scales be made anew from the histories when they are next asked for."""
        count_change(windows.last_HT for windows in self.agreed)


def join_table(kind: TableKind, histories: Sequence[OperandHistory]) -> None:
    table = ScaleTable(kind, [history.operand for history in histories])
    for number, history in enumerate(histories):
        history.join(table, number)


def delayed_recipes(model: nn.Module) -> list[DelayedFp8Recipe]:
    recipes: list[DelayedFp8Recipe] = []
    products = named_products(model)
    for product in products.values():
        recipe = product.recipe
        if isinstance(recipe, DelayedFp8Recipe):
            recipes.append(recipe)
    return recipes


class AgreedWindows(JoinedWindows):
    """The windows on which the ranks of one axis agree. `recipe_T`: the number of each one's recipe."""

    def __init__(self, axis: Axis, windows: Sequence[MaximaWindow], recipes: Sequence[int]):
        super().__init__(windows)
        self.axis = axis
        numbers = torch.tensor(recipes, dtype=torch.int32)
        recipe_T = numbers.repeat_interleave(torch.tensor(self.sizes))
        self.recipe_T = recipe_T.to(self.now_T.device)

    def record(self, places: Tensor, sound: Tensor) -> None:
        """Write what all ranks have seen in the place of the oldest step, unless the step was not `sound`. `places`: of
        each recipe, the place of that step."""
        agreed_T = agree_on_maxima(self.now_T, self.axis)
        place_T = places.index_select(0, self.recipe_T)
        place_1T = place_T[None]
        oldest_1T = self.last_HT.gather(0, place_1T)
        written_1T = torch.where(sound, agreed_T, oldest_1T)
        self.last_HT.scatter_(0, place_1T, written_1T)


def agree_on_maxima(seen: Tensor, axis: Axis) -> Tensor:
    """Over the ranks of the axis. What is not a number becomes infinite, which is above all numbers on every backend;
    the scale of the next step is then NaN."""
    numbers = seen.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return all_reduce_max_no_grad(numbers, axis)
