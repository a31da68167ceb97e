"""What one rank has to hold, compute and send for one microbatch, step by step. Torch-free.

Weights, their cuts and FLOPs are the anatomy's; what is kept for backward is read off a stack of tables.
Figures are those of one rank and one microbatch. Results are cached: a search asks for the same layer many times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from moefold.anatomy.steps import (
    StepSpec,
    Weight,
    block_steps,
    embed,
    is_moe,
    look_ahead,
    predict,
    set_aside,
    window_of,
)
from moefold.config.run import ModelConfig
from moefold.plan.choices import Choices
from moefold.plan.megatron_layers import MEGATRON
from moefold.plan.moefold_layers import MOEFOLD
from moefold.plan.sizes import Portion, Sizes
from moefold.plan.tensor import Stack
from moefold.plan.travel import Sent, sent

LINEAR = ("linear", "each")
STACKS: dict[str, Stack] = {"moefold": MOEFOLD, "megatron": MEGATRON}


@dataclass(frozen=True)
class Saved:
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


Class = tuple[str, tuple[str, ...]]  # of parameters: their grid, and the axes that cut them


@dataclass(frozen=True)
class StepCount:
    """One step of one layer on one rank. `parameters` are counted by class: grid and cutting axes."""

    spec: StepSpec
    parameters: tuple[tuple[Class, float], ...]
    quantized: float
    flops: float
    gemms: tuple[Gemm, ...]
    attention: float
    saved: tuple[Saved, ...]
    sent: tuple[Sent, ...]
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
    def remade(self) -> float:
        """What is made again in backward, or comes back from the host."""
        return sum(t.bytes for step in self.steps for t in step.saved if t.fate != "kept")

    @cached_property
    def parameters(self) -> Counter[Class]:
        total: Counter[Class] = Counter()
        for step in self.steps:
            for kind, count in step.parameters:
                total[kind] += count  # pyright: ignore[reportArgumentType]
        return total


@lru_cache(maxsize=256)
def alike(model: ModelConfig) -> tuple[int, ...]:
    """For each layer, those of multi-token prediction behind the others, the first one that is the same."""
    first: dict[tuple[bool, int], int] = {}
    kinds = [(is_moe(model, layer), window_of(model, layer)) for layer in range(model.layers + model.mtp)]
    return tuple(first.setdefault(kind, layer) for layer, kind in enumerate(kinds))


@lru_cache(maxsize=65_536)
def piece_count(
    model: ModelConfig, piece: str, layer: int, portion: Portion, choices: Choices, load: float = 1.0
) -> PieceCount:
    """E the embedding, t a layer, m a layer of multi-token prediction, L the head; `load` as in Sizes."""
    specs = {
        "E": lambda: [embed(model)],
        "t": lambda: block_steps(model, layer),
        "m": lambda: [look_ahead(model), *block_steps(model, layer), set_aside(model)],
        "L": lambda: [predict(model)],
    }[piece]()
    sizes = Sizes(model, portion, choices, window_of(model, layer), load)
    saved = saved_by(specs, sizes)
    return PieceCount(piece, tuple(step_count(spec, sizes, saved[spec.name]) for spec in specs))


def step_count(spec: StepSpec, s: Sizes, saved: tuple[Saved, ...]) -> StepCount:
    stack, parameters = STACKS[s.choices.stack], Counter[Class]()
    quantized = 0.0
    for weight in spec.weights:
        held = prod(weight.part(s.portion.degrees))
        axes = tuple(axis for _, axis in weight.cut)
        parameters["expert" if "ep" in axes else "dense", axes] += held  # pyright: ignore[reportArgumentType]
        if is_matrix(weight) and spec.name not in ("embed", "route", "predict"):
            quantized += held
    attention = s.T * 2 * spec.context * spec.seen(s.S)
    flops = s.T * spec.flops(s.S)
    return StepCount(
        spec,
        tuple(parameters.items()),
        quantized,
        flops,
        tuple(gemms(spec, s)),
        attention,
        saved,
        tuple(sent(spec, s)),
        (stack.working(spec.name, "F", s), stack.working(spec.name, "B", s)),
    )


def is_matrix(weight: Weight) -> bool:
    return len(weight.shape) > 1 and not weight.name.endswith("bias")


def gemms(spec: StepSpec, s: Sizes) -> list[Gemm]:
    """The products a step makes with its weights. What tp cuts meets all tokens of the cp rank."""
    if spec.name == "embed":
        return []
    if spec.name == "predict":
        return [Gemm("head", "head", s.C, s.P, s.D, times=1 + s.model.mtp)]
    found: list[Gemm] = []
    for weight in filter(is_matrix, spec.weights):
        *outer, k = weight.part(s.portion.degrees)
        name, axes = weight.name.split(".")[-1 if "experts" in weight.name else -2], dict(weight.cut).values()
        if "ep" in axes:
            found.append(Gemm(name, "grouped", s.R / s.e, prod(outer[1:]), k, groups=s.e))
        else:
            kind = "router" if spec.name == "route" else "dense"
            found.append(Gemm(name, kind, s.C if "tp" in axes else s.T, prod(outer), k))
    return found


def saved_by(specs: list[StepSpec], s: Sizes) -> dict[str, tuple[Saved, ...]]:
    """What each step keeps, with its fate. Where whole layers are recomputed, only their inputs stay."""
    found: dict[str, list[Saved]] = {spec.name: [] for spec in specs}
    whole = "layer" in s.choices.recomputed and "attend" in found
    for line in STACKS[s.choices.stack].kept:
        if line.step not in found or not line.when(s):
            continue
        fate = "offloaded" if line.read in s.choices.offloaded else "kept"
        if (whole and not line.entry) or not s.choices.recomputed.isdisjoint(line.made):
            fate = "recomputed"
        tensor = Saved(line.name, line.step, line.rows(s), line.width(s), line.each(s), fate, line.held in LINEAR)
        found[line.step].append(tensor)
    return {name: tuple(tensors) for name, tensors in found.items()}
