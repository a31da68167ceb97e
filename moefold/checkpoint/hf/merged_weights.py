"""Weights with their adapters merged, W + s B A, with magnitudes if there are some, a box at a time; and the adapters
of a model by its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.anatomy.adapters import AdapterSpec, adapters_of_all_ranks, is_grouped
from moefold.anatomy.products import adaptable_weights, product_place
from moefold.checkpoint.format.boxes import Box
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.config.run import Config


@dataclass(frozen=True)
class WeightAdapter:
    """The adapter of a weight: `a` and `b` are the names of its tensors."""

    spec: AdapterSpec
    a: str
    b: str
    magnitude: str = ""  # of rows; empty: there is none

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
    for prefix, weight in adaptable_weights(config.model):
        product = prefix + product_place(weight.name)
        if product in spec_of:
            spec = spec_of[product]
            magnitude = f"{product}.lora.magnitude" if spec.has_magnitude else ""
            adapter = WeightAdapter(spec, f"{product}.lora.a", f"{product}.lora.b", magnitude)
            adapters[prefix + weight.name] = adapter
    return adapters


@dataclass(frozen=True)
class MergedWeights:
    """Boxes of weights as `fetch_base` has them, plus those of their adapters. Sums are rounded once."""

    fetch_base: FetchBox
    adapters: WeightAdapters

    def fetch_box(self, name: str, box: Box) -> Tensor:
        adapter = self.adapters.get(name)
        if adapter is None:
            return self.fetch_base(name, box)
        rows = box
        if adapter.magnitude:  # whose lengths are those of whole rows
            rows = *box[:-1], (0, adapter.spec.product.inputs)
        base = self.fetch_base(name, rows)
        merged = self.with_change(base, rows, adapter)
        if adapter.magnitude:
            magnitude = self.fetch_base(adapter.magnitude, rows[:-1])
            lengths = torch.linalg.vector_norm(merged, dim=-1)
            merged *= (magnitude / lengths).unsqueeze(-1)
            merged = merged.narrow(-1, *box[-1])
        return merged.to(base.dtype)

    def with_change(self, base: Tensor, box: Box, adapter: WeightAdapter) -> Tensor:
        """W + s B A, in fp32 at least."""
        a = self.fetch_base(adapter.a, adapter.box_of_a(box))
        b = self.fetch_base(adapter.b, adapter.box_of_b(box))
        wide = torch.promote_types(base.dtype, torch.float32)
        first_output = int(adapter.is_grouped)
        matrices = b.to(wide).flatten(first_output, -2)
        change = matrices @ a.to(wide)
        return base.to(wide) + adapter.spec.scale * change.view_as(base)
