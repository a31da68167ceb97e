"""Statistics of the FP8 operands of a model at recorded steps: every `every`-th step.

Each product has a watch of its own (operand_watch.py); products that share the operand of one input are multiplied
together, and have one watch. At the end of a recorded step the ranks of a pipeline stage, which have the same products
in the same order, add up their sums and take the largest of their extremes; nothing waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from moefold.comm.host_copies import ToHost, integers_on_device
from moefold.layout.axes import World
from moefold.observe.fp8_stats import OPERAND_KINDS
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.linear import LinearGroup
from moefold.precision.operand_watch import IsRerun, OperandWatch, SeenCopy
from moefold.precision.recipes import Product, bind_fused_kernels, named_products

Watches = dict[str, OperandWatch]
ProductGroups = dict[str, list[Product]]  # by name: products that read one input


class StageOperands(NamedTuple):
    """Figures of the operands of a pipeline stage, for each of them activation, gradient and weight. `sums_O5`: values
    other than zero, those that became zero, squared errors, squared values, saturated values. `extremes_O3`: largest
    magnitude, largest scale, smallest scale negated."""

    products: list[str]
    sums_O5: ToHost
    extremes_O3: ToHost


class OperandStatistics:
    """Empty for a model without FP8 products."""

    def __init__(self, model: nn.Module, world: World, every: int, is_rerun: IsRerun):
        self.world = world
        self.every = every
        self.watches = give_watches(model, is_rerun)
        self.records = False

    def is_recorded(self, number: int) -> bool:
        """Whether the step of this number is."""
        if not self.watches:
            return False
        return number % self.every == 0

    def begin_step(self, number: int) -> None:
        self.records = self.is_recorded(number)
        if not self.records:
            return
        for watch in self.watches.values():
            watch.begin(number // self.every)

    @torch.no_grad()
    def end_step(self) -> StageOperands | None:
        """The figures of the step, over all ranks of the stage; None if it is not recorded."""
        if not self.records:
            return None
        seen: list[SeenCopy] = []
        places: list[int] = []
        first_place = 0
        for watch in self.watches.values():
            for each in watch.end():
                kind = OPERAND_KINDS.index(each.kind)
                seen.append(each)
                places.append(first_place + kind)
            first_place += len(OPERAND_KINDS)
        sums_O5, extremes_O3 = self.figures_by_operand(seen, places)
        everyone = self.world.dp_cp_tp
        all_sums_O5 = all_reduce_no_grad(sums_O5, everyone)
        all_extremes_O3 = all_reduce_max_no_grad(extremes_O3, everyone)
        products = list(self.watches)
        sums = ToHost(all_sums_O5)
        extremes = ToHost(all_extremes_O3)
        return StageOperands(products, sums, extremes)

    def figures_by_operand(self, seen: Sequence[SeenCopy], places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of all copies of each operand."""
        products = len(self.watches)
        operands = products * len(OPERAND_KINDS)
        device = self.world.device
        sums_O5 = torch.zeros(operands, 5, dtype=torch.float64, device=device)
        extremes_O3 = sums_O5.new_full((operands, 3), -torch.inf)
        if not seen:
            return sums_O5, extremes_O3
        place_S = integers_on_device(places, device)
        sums = [sums_of_copy(each) for each in seen]
        sums_S5 = torch.stack(sums)
        sums_O5.index_add_(0, place_S, sums_S5)
        extremes = [each.figures.extremes_3 for each in seen]
        extremes_S3 = torch.stack(extremes)
        place_S1 = place_S[:, None]
        place_S3 = place_S1.expand_as(extremes_S3)
        extremes_O3.scatter_reduce_(0, place_S3, extremes_S3, "amax")
        return sums_O5, extremes_O3


def sums_of_copy(seen: SeenCopy) -> Tensor:
    """The five sums of one copy, as `StageOperands` has them."""
    saturated_1 = seen.saturated.double()
    return torch.cat((seen.figures.sums_4, saturated_1))


def give_watches(model: nn.Module, is_rerun: IsRerun) -> Watches:
    """A watch for every FP8 product, by name: its recipe becomes a copy with that watch."""
    watches: Watches = {}
    by_input = products_by_input(model)
    for name, products in by_input.items():
        made: dict[int, Fp8Recipe] = {}  # by the identity of the recipe before
        for product in products:
            assert isinstance(product.recipe, Fp8Recipe)
            watch = watches.setdefault(name, OperandWatch(product.recipe.kernels, is_rerun))
            before = id(product.recipe)
            if before not in made:
                made[before] = copy.copy(product.recipe)
                made[before].watch = watch
            product.recipe = made[before]
    if watches:
        bind_fused_kernels(model)  # fused kernels hold the recipes too
    return watches


def products_by_input(model: nn.Module) -> ProductGroups:
    """FP8 products by name; those that are multiplied together are one: `blocks.0.attention.query, key, value`."""
    groups: dict[nn.Module, tuple[Product, ...]] = {}
    for module in model.modules():
        if isinstance(module, LinearGroup) and module.share_input:
            layers = module.layers
            groups |= dict.fromkeys(layers, layers)
    found: ProductGroups = {}
    products = named_products(model)
    names = {product: name for name, product in products.items()}
    for product in names:
        if not isinstance(product.recipe, Fp8Recipe):
            continue
        together = groups.get(product, (product,))
        if product is together[0]:
            names_together = [names[each] for each in together]
            joined = joined_name(names_together)
            found[joined] = list(together)
    return found


def joined_name(names: list[str]) -> str:
    """The name of the first, and of the others their last parts."""
    first, *others = names
    last_parts = [other.split(".")[-1] for other in others]
    parts = [first, *last_parts]
    return ", ".join(parts)
