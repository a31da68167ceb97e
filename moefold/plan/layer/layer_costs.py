"""Costs of one layer for one microbatch on one rank, step by step: parameters, FLOPs, saved bytes and sent bytes.

Torch-free. Weights, their sharding and FLOPs come from `anatomy/`, tensors saved for backward from the tables of a
stack. Results are cached, because a search needs the same layer many times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from moefold.anatomy.products import product_place
from moefold.anatomy.step_specs import (
    StepSpec,
    WeightSpec,
    block_step_specs,
    embed_step,
    is_moe_layer,
    look_ahead_step,
    predict_step,
    set_aside_step,
    sliding_window_of,
)
from moefold.anatomy.update_groups import AS_THE_RUN
from moefold.config.memory_regions import REGIONS, expert_weight_layers
from moefold.config.optimizer_groups import first_match, parse_groups
from moefold.config.precision_recipes import RecipeSpec
from moefold.config.run import ModelConfig, PrecisionConfig
from moefold.config.stash_pages import LEAST_ROW_BYTES, stashed_bytes
from moefold.plan.layer.bytes_sent import AxisTraffic, step_bytes_sent
from moefold.plan.layer.fp8_tensors import TILE_NUMBERS, copy_bytes, padded_rows, quantise_pass_bytes, tile_count
from moefold.plan.layer.layer_recipes import PLAIN, PLAIN_PRECISION, LayerRecipes, recipes_of_layers
from moefold.plan.layer.megatron_layers import MEGATRON_STACK
from moefold.plan.layer.moefold_layers import MOEFOLD_STACK
from moefold.plan.layer.rank_shapes import RankPortion, RankShapes
from moefold.plan.layer.tensor_table import FIXED_ELEMENT_BYTES, LayerStack, TensorEntry, expert_rows
from moefold.plan.length_histogram import mean_over_tokens
from moefold.plan.options import PlanChoices, regions_in_layer

LINEAR_STORAGE = ("linear", "each", "columns", "tiles")  # of GEMM inputs, as `tensor_table.element_bytes` names it
DEFERRED_GEMMS = ("dense", "grouped")  # GEMMs whose weight gradients may be deferred
UNQUANTIZED_STEPS = ("embed", "route", "predict")
LAYER_STACKS: dict[str, LayerStack] = {"moefold": MOEFOLD_STACK, "megatron": MEGATRON_STACK}


@dataclass(frozen=True)
class SavedActivation:
    """A tensor that a step saves for its backward. `fate`: kept, recomputed, offloaded or stashed."""

    name: str
    step: str
    rows: float
    width: float
    element_bytes: float
    fate: str = "kept"
    linear: bool = False  # the input of a GEMM with weights

    @property
    def bytes(self) -> float:
        return self.rows * self.width * self.element_bytes

    @property
    def page_bytes(self) -> float:
        """Bytes of the pages that its rows take in a stash."""
        return stashed_bytes(self.rows, self.width * self.element_bytes)

    @property
    def arithmetic(self) -> str:
        return f"{self.rows:,.0f} x {self.width:,.0f} x {self.element_bytes:g} B"


SavedTensors = tuple[SavedActivation, ...]


@dataclass(frozen=True)
class Gemm:
    """A GEMM of a step: `groups` products of (rows, k) by (k, n), computed `times` times in forward, in the formats of
    a recipe of this trainer."""

    name: str
    kind: str  # dense, grouped, router or head
    rows: float
    n: float
    k: float
    groups: float = 1.0
    times: int = 1
    recipe: RecipeSpec = PLAIN

    @property
    def flops(self) -> float:
        one = 2 * self.rows * self.n * self.k
        return one * self.groups * self.times


Gemms = tuple[Gemm, ...]
ParameterClass = tuple[str, tuple[str, ...]]  # grid of the parameters, and the axes that shard them


@dataclass(frozen=True)
class StepCount:
    """Costs of one step of one layer on one rank. `parameters` are counted by class: grid and sharding axes.
    `quantized`: parameters with quantised copies; `copies`: bytes of these; `requantised`: bytes moved to make FP8
    copies of the recipes once more."""

    spec: StepSpec
    parameters: tuple[tuple[ParameterClass, float], ...]
    quantized: float
    copies: float
    requantised: float
    flops: float
    gemms: Gemms
    attention: float
    saved: SavedTensors
    sent: tuple[AxisTraffic, ...]
    working: tuple[float, float]  # bytes of the working sets of forward and backward, beside saved tensors
    waiting: float  # bytes held for deferred weight gradients

    @property
    def kept_tensors(self) -> list[SavedActivation]:
        return [tensor for tensor in self.saved if tensor.fate == "kept"]

    @property
    def kept(self) -> float:
        return self.bytes_with_fate("kept")

    @property
    def restored(self) -> float:
        """Bytes of tensors that are recomputed in backward, or copied back from the host."""
        return self.bytes_with_fate("recomputed", "offloaded")

    @property
    def recomputed(self) -> float:
        return self.bytes_with_fate("recomputed")

    @property
    def offloaded(self) -> float:
        return self.bytes_with_fate("offloaded")

    @property
    def stashed(self) -> float:
        return self.bytes_with_fate("stashed")

    @property
    def stash_pages(self) -> float:
        """Bytes of the pages that stashed rows take."""
        return sum(tensor.page_bytes for tensor in self.saved if tensor.fate == "stashed")

    def bytes_with_fate(self, *fates: str) -> float:
        total = 0
        for tensor in self.saved:
            if tensor.fate in fates:
                total += tensor.bytes
        return total

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True)
class PieceCount:
    """Costs of a piece of a layout: E, a layer (dense or MoE), m, or L."""

    name: str
    steps: tuple[StepCount, ...]
    recomputes_layers: bool = False

    @cached_property
    def kept(self) -> float:
        return sum(step.kept for step in self.steps)

    @cached_property
    def restored_bytes(self) -> float:
        return sum(step.restored for step in self.steps)

    @cached_property
    def offloaded(self) -> float:
        return sum(step.offloaded for step in self.steps)

    def offloaded_through(self, step: StepCount) -> float:
        """Bytes that the steps up to this one offload."""
        number = self.steps.index(step)
        steps = self.steps[: number + 1]
        return sum(earlier.offloaded for earlier in steps)

    def recomputed_at(self, step: StepCount) -> float:
        """Bytes recomputed when backward comes to a step: those of the step, and of steps before it with which it is
        recomputed, or whose output it reads. Attention by itself, unless whole layers are recomputed."""
        number = self.steps.index(step)
        together: list[StepCount] = []
        for earlier in self.steps[:number]:
            together.append(earlier)
            if earlier.name == "attend" and not self.recomputes_layers:
                together.clear()
        together.append(step)
        return sum(other.recomputed for other in together)

    @cached_property
    def parameters(self) -> Counter[ParameterClass]:
        total: Counter[ParameterClass] = Counter()
        for step in self.steps:
            for kind, count in step.parameters:
                total[kind] += count  # pyright: ignore[reportArgumentType]
        return total


class GroupMark(NamedTuple):
    """What `optim.groups` says of a weight, as far as its costs depend on it."""

    frozen: bool
    rule: str | None


class LayerKind(NamedTuple):
    """What tells the costs of layers apart. `groups`: of each weight; empty without `optim.groups`."""

    is_moe: bool
    window: int
    recipes: LayerRecipes
    recomputed: frozenset[str]
    offloaded: frozenset[str]
    groups: tuple[GroupMark, ...]
    on_host: bool  # its expert weights


@lru_cache(maxsize=256)
def first_alike_layers(
    model: ModelConfig,
    precision: PrecisionConfig = PLAIN_PRECISION,
    recompute: tuple[str, ...] = (),
    offload: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    expert_weights: tuple[str, ...] = (),
) -> tuple[int, ...]:
    """For each layer, the first layer of the same kind (dense or MoE, sliding window, recipes, recomputed and offloaded
    regions, groups of its weights, experts on the host). MTP layers come last."""
    first: dict[LayerKind, int] = {}
    alike: list[int] = []
    recipes_by_layer = recipes_of_layers(model, precision)
    on_host = expert_weight_layers(expert_weights, model.layers + model.mtp)
    for layer, recipes in enumerate(recipes_by_layer):
        kind = LayerKind(
            is_moe=is_moe_layer(model, layer),
            window=sliding_window_of(model, layer),
            recipes=recipes,
            recomputed=regions_in_layer(recompute, layer),
            offloaded=frozenset() if is_last_layer(model, layer) else regions_in_layer(offload, layer),
            groups=groups_in_layer(model, layer, groups),
            on_host=layer in on_host,
        )
        same = first.setdefault(kind, layer)
        alike.append(same)
    return tuple(alike)


def groups_in_layer(model: ModelConfig, layer: int, groups: tuple[str, ...]) -> tuple[GroupMark, ...]:
    if not groups:
        return ()
    entries = parse_groups(groups)
    piece = "t" if layer < model.layers else "m"
    marks: list[GroupMark] = []
    for name, _ in named_weights(model, piece, layer):
        group = first_match(entries, name) or AS_THE_RUN
        marks.append(GroupMark(group.frozen, group.rule))
    return tuple(marks)


def named_weights(model: ModelConfig, piece: str, layer: int) -> Iterator[tuple[str, WeightSpec]]:
    """The weights of a piece with their full names."""
    for step in piece_steps(model, piece, layer):
        prefix = name_prefix(model, piece, layer, step.name)
        for weight in step.weights:
            yield prefix + weight.name, weight


def name_prefix(model: ModelConfig, piece: str, layer: int, step: str) -> str:
    if piece in ("E", "L"):
        return ""
    if piece == "t":
        return f"blocks.{layer}."
    ahead = f"ahead.{layer - model.layers}."
    return ahead if step in ("look_ahead", "set_aside") else f"{ahead}block."


def is_last_layer(model: ModelConfig, layer: int) -> bool:
    return layer == model.layers + model.mtp - 1


@lru_cache(maxsize=65_536)
def count_piece(
    model: ModelConfig, piece: str, layer: int, portion: RankPortion, choices: PlanChoices, load: float = 1.0
) -> PieceCount:
    """Costs of a piece: E the embedding, t a layer, m an MTP layer, L the head. `load` as in RankShapes."""
    outside = piece in ("E", "L")
    is_last = outside or is_last_layer(model, layer)
    choices = choices.in_layer(layer, is_last)
    specs = piece_steps(model, piece, layer)
    window = sliding_window_of(model, layer)
    products = recipes_of_layers(model, portion.precision)[layer]
    shapes = RankShapes(model, portion, choices, window, load, products)
    saved = saved_by_steps(specs, shapes)
    steps: list[StepCount] = []
    for spec in specs:
        tensors = saved[spec.name]
        step = count_step(spec, shapes, tensors)
        steps.append(step)
    recomputes_layers = "layer" in choices.recomputed
    return PieceCount(piece, tuple(steps), recomputes_layers)


def piece_steps(model: ModelConfig, piece: str, layer: int) -> list[StepSpec]:
    if piece == "E":
        return [embed_step(model)]
    if piece == "L":
        return [predict_step(model)]
    block = block_step_specs(model, layer)
    if piece == "t":
        return block
    return [look_ahead_step(model), *block, set_aside_step(model)]


def parameter_class(weight: WeightSpec, degrees: Mapping[str, int]) -> ParameterClass:
    axes = tuple(axis for _, axis in weight.cut_over(degrees))
    grid = "expert" if "ep" in axes else "dense"
    return grid, axes


def count_step(spec: StepSpec, s: RankShapes, saved: SavedTensors) -> StepCount:
    stack = LAYER_STACKS[s.choices.stack]
    parameters = Counter[ParameterClass]()
    quantized = 0.0
    copies = 0.0
    requantised = 0.0
    has_copies = s.recipe.copies and spec.name not in UNQUANTIZED_STEPS
    # Parameters on the rank, by the axes that shard them.
    for weight in spec.weights:
        part = weight.part(s.portion.degrees)
        held = prod(part)
        kind = parameter_class(weight, s.portion.degrees)
        parameters[kind] += held  # pyright: ignore[reportArgumentType]
        recipe = recipe_of_weight(weight, s)
        if recipe.quantises:
            copies += copy_bytes(weight, recipe, s)
            requantised += held * quantise_pass_bytes(recipe, 2, s)
            quantized += held
        elif has_copies and is_weight_matrix(weight):
            quantized += held
            copies += held * s.recipe.copies
    seen = mean_over_tokens(spec.seen, s.choices.documents, s.S)
    attention_flops = s.T * 2 * spec.context * seen
    forward_working = stack.working_bytes(spec.name, "F", s)
    backward_working = stack.working_bytes(spec.name, "B", s)
    gemms = tuple(gemms_of_step(spec, s))
    waiting_products = deferred_product_bytes(gemms, saved, s)
    waiting = waiting_products + stack.waiting_bytes(spec.name, s)
    return StepCount(
        spec=spec,
        parameters=tuple(parameters.items()),
        quantized=quantized,
        copies=copies,
        requantised=requantised,
        flops=s.T * (2 * spec.matmul + 2 * spec.context * seen),
        gemms=gemms,
        attention=attention_flops,
        saved=saved,
        sent=tuple(step_bytes_sent(spec, s)),
        working=(forward_working, backward_working),
        waiting=waiting,
    )


def recipe_of_weight(weight: WeightSpec, s: RankShapes) -> RecipeSpec:
    place = product_place(weight.name)
    return s.products.spec(place)


def deferred_product_bytes(gemms: Gemms, saved: SavedTensors, s: RankShapes) -> float:
    """Bytes that deferred weight gradients of linear layers hold: inputs, also recomputed ones, and gradients of
    outputs. Router and head compute their weight gradients at once."""
    inputs = sum(tensor.bytes for tensor in saved if tensor.linear)
    outputs = 0.0
    quantised = 0.0
    for gemm in gemms:
        if gemm.recipe.quantises:
            quantised += gradient_copy_bytes(gemm, s)
        elif gemm.kind in DEFERRED_GEMMS:
            outputs += gemm.rows * gemm.n * gemm.groups
    return inputs + outputs * s.recipe.linear + quantised


def gradient_copy_bytes(gemm: Gemm, s: RankShapes) -> float:
    """Bytes that the deferred weight gradient of a product of an FP8 recipe holds of its output's gradient: a copy
    along columns, or the gradient as it is, and a table of tiles. Fused experts have one table, which they save."""
    total = gemm.rows * gemm.groups
    in_tiles = padded_rows(total, gemm.groups)
    is_fused = gemm.kind == "grouped" and s.fuses_experts
    tiles = 0.0
    if not is_fused:
        tiles = tile_count(total, gemm.groups) * TILE_NUMBERS
    table = tiles * FIXED_ELEMENT_BYTES["tiles"]
    if gemm.recipe.columns != "none":
        copy = in_tiles * gemm.n * FIXED_ELEMENT_BYTES["columns"]
        return copy + table
    held = in_tiles if is_fused else total
    gradient = held * gemm.n * s.recipe.wide
    return gradient + table


def is_weight_matrix(weight: WeightSpec) -> bool:
    is_bias = weight.name.endswith("bias")
    return len(weight.shape) > 1 and not is_bias


def gemms_of_step(spec: StepSpec, s: RankShapes) -> list[Gemm]:
    """GEMMs of a step with its weights. The input of weights sharded over tp is all tokens of the cp rank."""
    if spec.name == "embed":
        return []
    if spec.name == "predict":
        heads = 1 + s.model.mtp
        head = Gemm("head", "head", s.C, s.P, s.D, times=heads)
        return [head]
    gemms: list[Gemm] = []
    matrices = filter(is_weight_matrix, spec.weights)
    for weight in matrices:
        *outer, k = weight.part(s.portion.degrees)
        axes = [axis for _, axis in weight.cut]
        name = gemm_name(weight)
        recipe = recipe_of_weight(weight, s)
        if "ep" in axes:
            rows_per_expert = s.R / s.e
            n = prod(outer[1:])
            gemm = Gemm(name, "grouped", rows_per_expert, n, k, groups=s.e, recipe=recipe)
        else:
            kind = "router" if spec.name == "route" else "dense"
            rows = s.C if "tp" in axes else s.T
            n = prod(outer)
            gemm = Gemm(name, kind, rows, n, k, recipe=recipe)
        gemms.append(gemm)
    return gemms


def gemm_name(weight: WeightSpec) -> str:
    """Name of a weight's GEMM: the last part of an expert weight's name, the part before `.weight` of others."""
    parts = weight.name.split(".")
    return parts[-1] if "experts" in weight.name else parts[-2]


def saved_by_steps(specs: list[StepSpec], s: RankShapes) -> dict[str, SavedTensors]:
    """Tensors saved by each step, each with its fate."""
    saved: dict[str, list[SavedActivation]] = {}
    for spec in specs:
        saved[spec.name] = []
    stack = LAYER_STACKS[s.choices.stack]
    for entry in stack.saved:
        if entry.step not in saved or not entry.condition(s):
            continue
        tensor = SavedActivation(
            name=entry.name,
            step=entry.step,
            rows=entry.rows(s),
            width=entry.width(s),
            element_bytes=entry.element_bytes(s),
            fate=tensor_fate(entry, s),
            linear=entry.storage in LINEAR_STORAGE,
        )
        saved[entry.step].append(tensor)
    frozen: dict[str, SavedTensors] = {}
    for step, tensors in saved.items():
        frozen[step] = tuple(tensors)
    return frozen


def tensor_fate(entry: TensorEntry, s: RankShapes) -> str:
    """Fate of a tensor: kept, recomputed, offloaded or stashed. Where layers are recomputed, only their inputs are
    kept."""
    choices = s.choices
    in_layer = entry.step in REGIONS["layer"].spans
    layer_recomputed = in_layer and "layer" in choices.recomputed
    if layer_recomputed and not entry.layer_input:
        return "recomputed"
    if not choices.recomputed.isdisjoint(entry.remade_by):
        return "recomputed"
    for region in choices.offloaded:
        if is_saved_inside(entry, region):
            return "offloaded"
    return "stashed" if is_stashed(entry, s) else "kept"


def is_stashed(entry: TensorEntry, s: RankShapes) -> bool:
    """Whether a tensor has rows of experts that are wide enough for pages."""
    has_rows = entry.step == "experts" and entry.rows is expert_rows
    is_number = entry.storage.startswith("int")
    row_bytes = entry.width(s) * entry.element_bytes(s)
    return s.portion.stashes and has_rows and not is_number and row_bytes >= LEAST_ROW_BYTES


def is_saved_inside(entry: TensorEntry, region: str) -> bool:
    """Whether a step saves a tensor inside a region, which spans the step or reads the tensor."""
    spanned = REGIONS[region].spans
    return entry.step in spanned or region in entry.read_by
