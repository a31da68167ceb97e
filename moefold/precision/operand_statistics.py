"""Statistics of the FP8 operands of a model at recorded steps: every `every`-th step.

Each product has a watch of its own (operand_watch.py); products that read one input and share a recipe are multiplied
together, and have one watch. At the end of a recorded step the ranks of a pipeline stage, which have the same products
in the same order, add up their sums and take the largest of their extremes; nothing waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from moefold.comm.host_copies import ToHost, integers_on_device
from moefold.layout.axes import World
from moefold.observe.fp8_stats import OPERAND_KINDS
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.linear import LinearGroup
from moefold.precision.operand_watch import OperandWatch, SeenCopy
from moefold.precision.recipes import Product, bind_fused_kernels, named_products


class StageOperands(NamedTuple):
    """Figures of the operands of a pipeline stage, for each of them activation, gradient and weight. `sums_O5`: values
    other than zero, those that became zero, squared errors, squared values, saturated values. `extremes_O3`: largest
    magnitude, largest scale, smallest scale negated."""

    products: list[str]
    sums_O5: ToHost
    extremes_O3: ToHost


class OperandStatistics:
    """Empty for a model without FP8 products."""

    def __init__(self, model: nn.Module, world: World, every: int, is_rerun: Callable[[], bool]):
        self.world = world
        self.every = every
        self.watches = give_watches(model, is_rerun)
        self.records = False

    def begin_step(self, number: int) -> None:
        self.records = bool(self.watches) and number % self.every == 0
        if self.records:
            for watch in self.watches.values():
                watch.begin()

    @torch.no_grad()
    def end_step(self) -> StageOperands | None:
        """The figures of the step, over all ranks of the stage; None if it is not recorded."""
        if not self.records:
            return None
        seen: list[SeenCopy] = []
        places: list[int] = []
        for number, watch in enumerate(self.watches.values()):
            for each in watch.end():
                seen.append(each)
                places.append(number * len(OPERAND_KINDS) + OPERAND_KINDS.index(each.kind))
        sums_O5, extremes_O3 = self.figures_by_operand(seen, places)
        everyone = self.world.dp_cp_tp
        sums_O5 = all_reduce_no_grad(sums_O5, everyone)
        extremes_O3 = all_reduce_max_no_grad(extremes_O3, everyone)
        return StageOperands(list(self.watches), ToHost(sums_O5), ToHost(extremes_O3))

    def figures_by_operand(self, seen: Sequence[SeenCopy], places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of all copies of each operand."""
        operands = len(self.watches) * len(OPERAND_KINDS)
        device = self.world.device
        sums_O5 = torch.zeros(operands, 5, dtype=torch.float64, device=device)
        extremes_O3 = torch.full((operands, 3), -torch.inf, dtype=torch.float64, device=device)
        if not seen:
            return sums_O5, extremes_O3
        sums_S4 = torch.stack([each.figures.sums_4 for each in seen])
        saturated_S1 = torch.stack([each.saturated for each in seen])
        sums_S5 = torch.cat((sums_S4, saturated_S1.double()), 1)
        extremes_S3 = torch.stack([each.figures.extremes_3 for each in seen])
        place_S = integers_on_device(places, device)
        sums_O5.index_add_(0, place_S, sums_S5)
        place_S3 = place_S[:, None].expand_as(extremes_S3)
        extremes_O3.scatter_reduce_(0, place_S3, extremes_S3, "amax")
        return sums_O5, extremes_O3


def give_watches(model: nn.Module, is_rerun: Callable[[], bool]) -> dict[str, OperandWatch]:
    """A watch for every FP8 product, by name: its recipe becomes a copy with that watch."""
    watches: dict[str, OperandWatch] = {}
    for name, products in products_by_input(model).items():
        recipe = copy.copy(products[0].recipe)
        assert isinstance(recipe, Fp8Recipe)
        recipe.watch = OperandWatch(recipe.kernels, is_rerun)
        for product in products:
            product.recipe = recipe
        watches[name] = recipe.watch
    if watches:
        bind_fused_kernels(model)  # fused kernels hold the recipes too
    return watches


def products_by_input(model: nn.Module) -> dict[str, list[Product]]:
    """FP8 products by name; those that are multiplied together are one: `blocks.0.attention.query, key, value`."""
    groups: dict[nn.Module, tuple[Product, ...]] = {}
    for module in model.modules():
        if isinstance(module, LinearGroup) and module.share_recipe:
            groups |= dict.fromkeys(module.layers, module.layers)
    found: dict[str, list[Product]] = {}
    names = {product: name for name, product in named_products(model).items()}
    for product, name in names.items():
        if isinstance(product.recipe, Fp8Recipe):
            together = groups.get(product, (product,))
            if product is together[0]:
                others = [names[other].rpartition(".")[2] for other in together[1:]]
                found[", ".join([name, *others])] = list(together)
    return found
