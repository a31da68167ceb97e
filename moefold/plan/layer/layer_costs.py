"""What one rank has to hold, compute and send for one microbatch, step by step. Torch-free.

Weights, their cuts and FLOPs are the anatomy's; what is kept for backward is read off a stack of tables.
Figures are those of one rank and one microbatch. Results are cached: a search asks for the same layer many times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

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
from moefold.config.run import ModelConfig
from moefold.plan.layer.bytes_sent import AxisTraffic, step_bytes_sent
from moefold.plan.layer.megatron_layers import MEGATRON_STACK
from moefold.plan.layer.moefold_layers import MOEFOLD_STACK
from moefold.plan.layer.rank_shapes import RankPortion, RankShapes
from moefold.plan.layer.tensor_table import LayerStack
from moefold.plan.options import PlanChoices

LINEAR_INPUTS = ("linear", "each")
LAYER_STACKS: dict[str, LayerStack] = {"moefold": MOEFOLD_STACK, "megatron": MEGATRON_STACK}


@dataclass(frozen=True)
class SavedActivation:
    """A tensor that a step keeps for its backward. `fate`: kept, recomputed or offloaded."""

    name: str
    step: str
    rows: float
    width: float
    each: float
    fate: str = "kept"
    linear: bool = False  # the input of a product with weights

    @property
    def bytes(self) -> float:
        return self.rows * self.width * self.each

    @property
    def how(self) -> str:
        return f"{self.rows:,.0f} x {self.width:,.0f} x {self.each:g} B"


@dataclass(frozen=True)
class Gemm:
    """`groups` products of (rows, k) by (k, n), done `times` times in a forward pass of the step."""

    name: str
    kind: str  # dense, grouped, router or head
    rows: float
    n: float
    k: float
    groups: float = 1.0
    times: int = 1

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.n * self.k * self.groups * self.times


ParameterClass = tuple[str, tuple[str, ...]]  # of parameters: their grid, and the axes that cut them


@dataclass(frozen=True)
class StepCount:
    """One step of one layer on one rank. `parameters` are counted by class: grid and cutting axes."""

    spec: StepSpec
    parameters: tuple[tuple[ParameterClass, float], ...]
    quantized: float
    flops: float
    gemms: tuple[Gemm, ...]
    attention: float
    saved: tuple[SavedActivation, ...]
    sent: tuple[AxisTraffic, ...]
    working: tuple[float, float]  # beside what is kept, forward and backward

    @property
    def kept(self) -> float:
        return sum(t.bytes for t in self.saved if t.fate == "kept")

    @property
    def waiting(self) -> float:
        """What weight gradients need that are computed apart: inputs of products, and gradients of their results."""
        inputs = sum(t.bytes for t in self.saved if t.fate == "kept" and t.linear)
        return inputs + sum(g.rows * g.n * g.groups for g in self.gemms) * 2

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True)
class PieceCount:
    """A piece of a layout: E, a layer (dense or with experts), m, or L."""

    name: str
    steps: tuple[StepCount, ...]

    @cached_property
    def kept(self) -> float:
        return sum(step.kept for step in self.steps)

    @cached_property
    def restored_bytes(self) -> float:
        """What is made again in backward, or comes back from the host."""
        return sum(t.bytes for step in self.steps for t in step.saved if t.fate != "kept")

    @cached_property
    def parameters(self) -> Counter[ParameterClass]:
        total: Counter[ParameterClass] = Counter()
        for step in self.steps:
            for kind, count in step.parameters:
                total[kind] += count  # pyright: ignore[reportArgumentType]
        return total


@lru_cache(maxsize=256)
def first_alike_layers(model: ModelConfig) -> tuple[int, ...]:
    """For each layer, those of multi-token prediction behind the others, the first one that is the same."""
    first: dict[tuple[bool, int], int] = {}
    kinds = [(is_moe_layer(model, layer), sliding_window_of(model, layer)) for layer in range(model.layers + model.mtp)]
    return tuple(first.setdefault(kind, layer) for layer, kind in enumerate(kinds))


@lru_cache(maxsize=65_536)
def count_piece(
    model: ModelConfig, piece: str, layer: int, portion: RankPortion, choices: PlanChoices, load: float = 1.0
) -> PieceCount:
    """E the embedding, t a layer, m a layer of multi-token prediction, L the head; `load` as in Sizes."""
    specs = {
        "E": lambda: [embed_step(model)],
        "t": lambda: block_step_specs(model, layer),
        "m": lambda: [look_ahead_step(model), *block_step_specs(model, layer), set_aside_step(model)],
        "L": lambda: [predict_step(model)],
    }[piece]()
    sizes = RankShapes(model, portion, choices, sliding_window_of(model, layer), load)
    saved = saved_by_steps(specs, sizes)
    return PieceCount(piece, tuple(count_step(spec, sizes, saved[spec.name]) for spec in specs))


def count_step(spec: StepSpec, s: RankShapes, saved: tuple[SavedActivation, ...]) -> StepCount:
    stack, parameters = LAYER_STACKS[s.choices.stack], Counter[ParameterClass]()
    quantized = 0.0
    for weight in spec.weights:
        held = prod(weight.part(s.portion.degrees))
        axes = tuple(axis for _, axis in weight.cut)
        parameters["expert" if "ep" in axes else "dense", axes] += held  # pyright: ignore[reportArgumentType]
        if is_weight_matrix(weight) and spec.name not in ("embed", "route", "predict"):
            quantized += held
    attention = s.T * 2 * spec.context * spec.seen(s.S)
    flops = s.T * spec.flops(s.S)
    return StepCount(
        spec,
        tuple(parameters.items()),
        quantized,
        flops,
        tuple(gemms_of_step(spec, s)),
        attention,
        saved,
        tuple(step_bytes_sent(spec, s)),
        (stack.working(spec.name, "F", s), stack.working(spec.name, "B", s)),
    )


def is_weight_matrix(weight: WeightSpec) -> bool:
    return len(weight.shape) > 1 and not weight.name.endswith("bias")


def gemms_of_step(spec: StepSpec, s: RankShapes) -> list[Gemm]:
    """The products a step makes with its weights. What tp cuts meets all tokens of the cp rank."""
    if spec.name == "embed":
        return []
    if spec.name == "predict":
        return [Gemm("head", "head", s.C, s.P, s.D, times=1 + s.model.mtp)]
    found: list[Gemm] = []
    for weight in filter(is_weight_matrix, spec.weights):
        *outer, k = weight.part(s.portion.degrees)
        name, axes = weight.name.split(".")[-1 if "experts" in weight.name else -2], dict(weight.cut).values()
        if "ep" in axes:
            found.append(Gemm(name, "grouped", s.R / s.e, prod(outer[1:]), k, groups=s.e))
        else:
            kind = "router" if spec.name == "route" else "dense"
            found.append(Gemm(name, kind, s.C if "tp" in axes else s.T, prod(outer), k))
    return found


def saved_by_steps(specs: list[StepSpec], s: RankShapes) -> dict[str, tuple[SavedActivation, ...]]:
    """What each step keeps, with its fate. Where whole layers are recomputed, only their inputs stay."""
    found: dict[str, list[SavedActivation]] = {spec.name: [] for spec in specs}
    whole = "layer" in s.choices.recomputed and "attend" in found
    for line in LAYER_STACKS[s.choices.stack].kept:
        if line.step not in found or not line.when(s):
            continue
        fate = "offloaded" if line.read in s.choices.offloaded else "kept"
        if (whole and not line.entry) or not s.choices.recomputed.isdisjoint(line.made):
            fate = "recomputed"
        tensor = SavedActivation(
            line.name, line.step, line.rows(s), line.width(s), line.each(s), fate, line.held in LINEAR_INPUTS
        )
        found[line.step].append(tensor)
    return {name: tuple(tensors) for name, tensors in found.items()}
