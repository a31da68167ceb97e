"""Weights with their adapters merged, W + s B A, a box at a time; and the adapters of a model by its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.anatomy.adapters import AdapterSpec, adapters_of_all_ranks, is_grouped
from moefold.anatomy.products import product_place, product_weights
from moefold.checkpoint.format.boxes import Box
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.config.run import Config


@dataclass(frozen=True)
class WeightAdapter:
    """The adapter of a weight: `a` and `b` are the names of its tensors."""

    spec: AdapterSpec
    a: str
    b: str

    @property
    def is_grouped(self) -> bool:
        return is_grouped(self.spec.product)

    def box_of_a(self, box: Box) -> Box:
        """The box of A that a box of the weight is a product with."""
        experts = box[: self.is_grouped]
        return *experts, (0, self.spec.rank), box[-1]

    def box_of_b(self, box: Box) -> Box:
        return *box[:-1], (0, self.spec.rank)


WeightAdapters = dict[str, WeightAdapter]  # by the name of the weight


def weight_adapters(config: Config) -> WeightAdapters:
    """The adapters of a configured model, with the sizes of all ranks together."""
    spec_of = {spec.product.name: spec for spec in adapters_of_all_ranks(config)}
    adapters: WeightAdapters = {}
    for prefix, weight in product_weights(config.model):
        product = prefix + product_place(weight.name)
        if product in spec_of:
            spec = spec_of[product]
            adapters[prefix + weight.name] = WeightAdapter(spec, f"{product}.lora.a", f"{product}.lora.b")
    return adapters


@dataclass(frozen=True)
class MergedWeights:
    """Boxes of weights as `fetch_base` has them, plus those of their adapters. Sums are rounded once."""

    fetch_base: FetchBox
    adapters: WeightAdapters

    def fetch_box(self, name: str, box: Box) -> Tensor:
        base = self.fetch_base(name, box)
        adapter = self.adapters.get(name)
        if adapter is None:
            return base
        a = self.fetch_base(adapter.a, adapter.box_of_a(box))
        b = self.fetch_base(adapter.b, adapter.box_of_b(box))
        wide = torch.promote_types(base.dtype, torch.float32)
        first_output = int(adapter.is_grouped)
        matrices = b.to(wide).flatten(first_output, -2)
        change = matrices @ a.to(wide)
        merged = base.to(wide) + adapter.spec.scale * change.view_as(base)
        return merged.to(base.dtype)
