"""Tables of a layer's tensors: each entry has a number of rows, a width and the storage of an element.

A stack (`plan/layer/moefold_layers.py`, `plan/layer/megatron_layers.py`) has such tables for tensors that its steps
save for backward, and for temporary tensors. Rows and widths are functions of `RankShapes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moefold.config.precision_recipes import SCALE_BLOCK
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.options import PrecisionRecipe

ShapeFunction = Callable[[RankShapes], float]
ShapeCondition = Callable[[RankShapes], bool]

FIXED_ELEMENT_BYTES = {
    "fp32": 4.0,
    "int64": 8.0,
    "int32": 4.0,
    "byte": 1.0,
    "fp8": 1 + 4 / SCALE_BLOCK,
    "columns": 1 + 4 / SCALE_BLOCK,
    "tiles": 4.0,
}


def element_bytes(storage: str, recipe: PrecisionRecipe) -> float:
    """Bytes per element, by storage.

    wide     in the model's precision
    linear   a GEMM's input: quantised where the precision is low
    each     as linear, but quantised separately for two GEMMs
    copy     a quantised copy beside a wide tensor
    fp8      FP8 with an fp32 scale for 128 values, by a recipe of this trainer
    columns  as fp8, the input of a weight gradient; `tiles` is its table of tiles, in int32
    """
    if storage in FIXED_ELEMENT_BYTES:
        return FIXED_ELEMENT_BYTES[storage]
    if storage == "wide":
        return recipe.wide
    if storage == "linear":
        return recipe.linear
    if storage == "each":
        return 2 * recipe.linear if recipe.quantizes else recipe.wide
    return recipe.linear if recipe.quantizes else 0.0


def always(_: RankShapes) -> bool:
    return True


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a step. `remade_by`: regions whose recompute yields the tensor. `read_by`: regions
    inside steps that save it. `layer_input`: the input of a layer, which is kept where whole layers are recomputed."""

    name: str
    step: str
    rows: ShapeFunction
    width: ShapeFunction
    storage: str = "wide"
    remade_by: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    condition: ShapeCondition = always
    layer_input: bool = False

    def element_bytes(self, s: RankShapes) -> float:
        return element_bytes(self.storage, s.recipe)

    def total_bytes(self, s: RankShapes) -> float:
        elements = self.rows(s) * self.width(s)
        return elements * self.element_bytes(s)


class TensorTable:
    """Entries of one step. `only`, `remade_by` and `read_by` return views of the same table; entries added through a
    view have a further condition, or other regions."""

    def __init__(self, step: str = ""):
        self.step = step
        self.entries: list[TensorEntry] = []
        self.condition: ShapeCondition = always
        self.regions: tuple[str, ...] = ()
        self.readers: tuple[str, ...] = ()

    def add(
        self,
        name: str,
        rows: ShapeFunction,
        width: ShapeFunction,
        storage: str = "wide",
        read_by: tuple[str, ...] = (),
        layer_input: bool = False,
    ) -> None:
        regions = self.regions
        readers = self.readers + read_by
        entry = TensorEntry(name, self.step, rows, width, storage, regions, readers, self.condition, layer_input)
        self.entries.append(entry)

    def only(self, condition: ShapeCondition) -> TensorTable:
        outer = self.condition

        def both_hold(s: RankShapes) -> bool:
            return outer(s) and condition(s)

        view = self.view()
        view.condition = both_hold
        return view

    def remade_by(self, *regions: str) -> TensorTable:
        view = self.view()
        view.regions = regions
        return view

    def read_by(self, *regions: str) -> TensorTable:
        view = self.view()
        view.readers = (*self.readers, *regions)
        return view

    def view(self) -> TensorTable:
        view = TensorTable(self.step)
        view.entries = self.entries
        view.condition = self.condition
        view.regions = self.regions
        view.readers = self.readers
        return view


WorkingSet = list[TensorEntry]


@dataclass(frozen=True)
class LayerStack:
    """A trainer's layers: tensors saved by their steps, working sets (tensors that exist at the same time) by step and
    pass (F forward, B backward), and `waiting`: tensors held for deferred weight gradients, beside inputs that are
    saved as such and gradients of outputs."""

    saved: list[TensorEntry]
    working_sets: Mapping[tuple[str, str], list[WorkingSet]]
    waiting: list[TensorEntry]

    def waiting_bytes(self, step: str, s: RankShapes) -> float:
        size = 0.0
        for entry in self.waiting:
            if entry.step == step and entry.condition(s):
                size += entry.total_bytes(s)
        return size

    def working_bytes(self, step: str, pass_name: str, s: RankShapes) -> float:
        """Bytes of a step's largest working set."""
        largest = 0.0
        working_sets = self.working_sets.get((step, pass_name), ())
        for working_set in working_sets:
            present = [entry for entry in working_set if entry.condition(s)]
            size = sum(entry.total_bytes(s) for entry in present)
            largest = max(largest, size)
        return largest


# Rows, widths and conditions that both stacks use.


def rank_tokens(s: RankShapes) -> float:
    return s.T


def context_tokens(s: RankShapes) -> float:
    return s.C


def expert_rows(s: RankShapes) -> float:
    return s.R


def arrived_tokens(s: RankShapes) -> float:
    return s.N


def expert_weight_rows(s: RankShapes) -> float:
    return s.e * s.W


def stream_width(s: RankShapes) -> float:
    return s.D


def dispatched_token_width(s: RankShapes) -> float:
    return s.W


def expert_inner_width(s: RankShapes) -> float:
    return s.F


def shared_inner_width(s: RankShapes) -> float:
    return s.A


def dense_inner_width(s: RankShapes) -> float:
    return s.M


def expert_preactivation_width(s: RankShapes) -> float:
    return s.expert_parts * s.F


def shared_preactivation_width(s: RankShapes) -> float:
    return s.shared_parts * s.A


def dense_preactivation_width(s: RankShapes) -> float:
    return s.dense_parts * s.M


def expert_count(s: RankShapes) -> float:
    return s.E


def query_latent_width(s: RankShapes) -> float:
    return s.q_rank


def key_latent_width(s: RankShapes) -> float:
    return s.kv_rank


def attended_width(s: RankShapes) -> float:
    return s.H * s.V


def query_heads(s: RankShapes) -> float:
    return s.H


def qkv_width(s: RankShapes) -> float:
    queries = s.H * s.Q
    return queries + s.G * (s.Q + s.V)


def vocab_shard_width(s: RankShapes) -> float:
    return s.P


def joined_token_width(s: RankShapes) -> float:
    """Width of a stream and a token side by side, the input of an MTP layer."""
    return 2 * s.D


def one_column(_: RankShapes) -> float:
    return 1.0


def two_columns(_: RankShapes) -> float:
    return 2.0


def uses_mla(s: RankShapes) -> bool:
    return s.mla


def uses_gqa(s: RankShapes) -> bool:
    return not s.mla


def weighs_expert_outputs(s: RankShapes) -> bool:
    """Whether the router weight multiplies the experts' output, not their activation."""
    return not s.gate_inside


def separate_expert_wgrad(s: RankShapes) -> bool:
    """Whether the gradient of expert weights is allocated in backward, beside the sum that it is added to."""
    if s.fuses_experts and s.portion.accumulates:
        return False
    return not s.portion.defers_wgrad
