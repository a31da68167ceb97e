"""How long one microbatch takes in each step of the model on one rank: forward, data gradient, weight gradient.

    products, attention   arithmetic on a soft roofline: the FLOPs and bytes that `plan/layer/layer_costs.py` has
    passes                pointwise work, by the memory's bandwidth
    host                  launches beyond what the device is busy with; none where a graph replays the step
    joined                collectives of tensor and context parallelism, which stand in the way of the next kernel
    memory                forwards that recompute repeats, and copies to the host that compute does not hide
    travel                experts' rows between ranks: the lane that weaving hides

A piece of a layout (E, t, m, L) costs the sum of its steps, a stage the sum of its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from operator import add
from typing import NamedTuple

from moefold.anatomy.step_specs import sliding_window_of
from moefold.plan.layer import pointwise
from moefold.plan.layer.layer_costs import Gemm, StepCount, count_piece
from moefold.plan.layer.moefold_layers import writes_score_gradients
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.efficiency_fit import EXPERT_TILE_ROWS, attention_efficiency
from moefold.plan.machine.gpu import Gpu, roofline_seconds
from moefold.plan.memory.peak_memory import STATE_ELEMENT_BYTES, RunSetting
from moefold.plan.memory.rank_stages import StagePieces

BACKWARD_LAUNCH_RATIO = 1.5  # launches of a backward, over those of a forward; autograd launches from C++
HOPPER_BACKWARD_EFFICIENCY = (
    0.86,
    200.0,
)  # of our attention's backward, as `plan/machine/gpu.py` has them: by `moefold bench attention`


class OpSeconds(NamedTuple):
    """Of one op of one microbatch. `ideal` is what its FLOPs would take at the peak, a part of the first two."""

    ideal: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    host: float = 0.0
    joined: float = 0.0
    memory: float = 0.0
    travel: float = 0.0

    @property
    def device(self) -> float:
        return self.products + self.attention + self.passes

    @property
    def compute(self) -> float:
        """What keeps the compute lane."""
        return self.device + self.host + self.joined + self.memory

    @property
    def all(self) -> float:
        return self.compute + self.travel


class PassSeconds(NamedTuple):
    """The three ops of one microbatch through a step, a piece or a stage."""

    F: OpSeconds = OpSeconds()
    D: OpSeconds = OpSeconds()
    W: OpSeconds = OpSeconds()


def add_pass_seconds(a: PassSeconds, b: PassSeconds) -> PassSeconds:
    return PassSeconds(*(OpSeconds(*map(add, x, y)) for x, y in zip(a, b, strict=True)))


def sum_pass_seconds(passes: list[PassSeconds]) -> PassSeconds:
    found = PassSeconds()
    for each in passes:
        found = add_pass_seconds(found, each)
    return found


class StepClock:
    """How fast a rank of this setting works on this GPU. Pieces and stages are priced once."""

    def __init__(self, setting: RunSetting, gpu: Gpu):
        self.setting, self.gpu = setting, gpu
        self.pieces: dict[tuple[str, int], PassSeconds] = {}
        self.stages: dict[StagePieces, PassSeconds] = {}

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.gpu, self.setting.world)

    @cached_property
    def stream(self) -> float:
        return self.cluster.stream

    @cached_property
    def travel(self) -> float:
        """Seconds of one way to experts, or back."""
        s = self.setting
        return self.cluster.dispatch(s.config, s.choices)

    def stage(self, pieces: StagePieces) -> PassSeconds:
        if pieces not in self.stages:
            self.stages[pieces] = sum_pass_seconds([self.time_piece(*each) for each in pieces])
        return self.stages[pieces]

    def time_piece(self, piece: str, layer: int) -> PassSeconds:
        if (piece, layer) not in self.pieces:
            self.pieces[piece, layer] = self.add_fsdp_exchange(
                piece, layer, sum_pass_seconds(list(self.steps(piece, layer).values()))
            )
        return self.pieces[piece, layer]

    def steps(self, piece: str, layer: int) -> dict[str, PassSeconds]:
        """Every step of a piece by its name."""
        s = self.setting
        model = s.config.model
        sizes = RankShapes(model, s.portion, s.choices, sliding_window_of(model, layer))
        counts = count_piece(model, piece, layer, s.portion, s.choices)
        return {step.name: self.step(step, sizes) for step in counts.steps}

    def step(self, step: StepCount, s: RankShapes) -> PassSeconds:
        forward = self.forward(step, s)
        data, weight = self.backward(step, s)
        return PassSeconds(forward, data._replace(memory=self.recompute_seconds(step, s, forward)), weight)

    def forward(self, step: StepCount, s: RankShapes) -> OpSeconds:
        k, (launches, looped) = self.gpu.kernels, pointwise.count_launches(step.name, step.gemms, s)
        products = sum(self.product(g, g.rows * g.k + g.n * g.k, 2 * g.rows * g.n) * g.times for g in step.gemms)
        attention = self.attention(step, s, step.attention, k.attention_forward, k.forward_half)
        passes = (
            pointwise.pointwise_bytes(step.name, s) + pointwise.quantization_bytes(step.gemms, s)
        ) / self.stream + launches * k.start
        device = products + attention + passes
        return OpSeconds(
            self.ideal(step),
            products,
            attention,
            passes,
            self.host(step, device, launches + looped) + self.waits(step),
            self.joined(step, "forward", attention),
            0.0,
            self.travel if step.spec.lane == "comm" else 0.0,
        )

    def backward(self, step: StepCount, s: RankShapes) -> tuple[OpSeconds, OpSeconds]:
        """Data gradient and weight gradient. The weight gradient is added to fp32 sums: 8 bytes an element."""
        k, (launches, looped) = self.gpu.kernels, pointwise.count_launches(step.name, step.gemms, s)
        products = sum(self.product(g, g.rows * g.n + g.n * g.k, 2 * g.rows * g.k) * g.times for g in step.gemms)
        ours = s.choices.stack == "moefold" and writes_score_gradients(s)
        share, half = HOPPER_BACKWARD_EFFICIENCY if ours else (k.attention_backward, k.backward_half)
        attention = self.attention(step, s, 2.5 * step.attention, share, half)
        moved = 2 * pointwise.pointwise_bytes(step.name, s) + pointwise.quantization_bytes(step.gemms, s, outputs=True)
        passes = moved / self.stream + BACKWARD_LAUNCH_RATIO * launches * k.start
        weights = sum(self.product(g, g.rows * (g.n + g.k), 8 * g.n * g.k) * g.times for g in step.gemms)
        ideal = self.ideal(step)
        of_weights = (
            ideal * sum(g.flops for g in step.gemms) / max(1.0, sum(g.flops for g in step.gemms) + step.attention)
        )
        device = products + attention + passes
        data = OpSeconds(
            2 * ideal - of_weights,
            products,
            attention,
            passes,
            self.host(step, device + weights, BACKWARD_LAUNCH_RATIO * (launches + looped)),
            self.joined(step, "backward", attention),
            0.0,
            self.travel if step.spec.lane == "comm" else 0.0,
        )
        return data, OpSeconds(of_weights, weights)

    def product(self, g: Gemm, read: float, written: float) -> float:
        """Seconds of `groups` products, each reading so many elements of operands and writing so many bytes."""
        k, choices = self.gpu.kernels, self.setting.choices
        low = g.kind in pointwise.LOW_PRECISION_GEMMS
        rate = self.gpu.achieved_rate(choices.precision if low else "bf16")
        rows = g.rows
        if g.groups > 1:
            rate, rows = rate * k.grouped, g.rows + EXPERT_TILE_ROWS / 2
        element = choices.recipe.linear if low else choices.recipe.wide
        seconds = 2 * rows * g.n * g.k * g.groups / rate
        moving = (read * element + written) * g.groups / self.gpu.hbm
        return roofline_seconds(seconds, moving, k.blend)

    def attention(self, step: StepCount, s: RankShapes, flops: float, share: float, half: float) -> float:
        """A ring of cp ranks works on one chunk of keys at a time."""
        if not flops:
            return 0.0
        chunk = s.S / s.portion.cp
        sees = min(step.spec.window or chunk, chunk)
        rate = self.gpu.peak["bf16"] * share * attention_efficiency(sees, (s.Q + s.V) / 2, half)
        return flops / rate

    def ideal(self, step: StepCount) -> float:
        """Seconds of a forward's FLOPs at the peak of the recipe."""
        return step.flops / self.gpu.peak_flops(self.setting.choices.precision)

    def host(self, step: StepCount, device: float, launches: float) -> float:
        """Seconds in which the device waits for launches: host and device work side by side, but not quite."""
        graphs = self.setting.choices.graphs
        replayed = graphs == "whole" or (graphs == "static" and step.spec.static)
        return 0.0 if replayed else math.hypot(device, launches * self.gpu.host.launch) - device

    def waits(self, step: StepCount) -> float:
        """How many rows arrive is known only to the device, and the host asks once, unless a graph holds the layer."""
        asks = step.name == "dispatch" and self.travel > 0 and self.setting.choices.graphs != "whole"
        return self.gpu.host.sync if asks else 0.0

    def joined(self, step: StepCount, way: str, attention: float) -> float:
        """Collectives of tp and cp. Keys and values go round while attention works on those that are there."""
        p = self.setting.config.parallel
        seconds = 0.0
        for sent in step.sent:
            size = getattr(sent, way)
            if sent.axis == "tp":
                seconds += self.cluster.ring_seconds(size, 1, p.tp)
            elif sent.axis == "cp":
                hidden = attention if p.context == "ring" else 0.0
                seconds += max(0.0, self.cluster.neighbour_seconds(size, p.tp * p.cp) - hidden)
        return seconds

    def recompute_seconds(self, step: StepCount, s: RankShapes, forward: OpSeconds) -> float:
        """What recompute adds to the backward of this step, and offloading what compute does not hide."""
        again = sum(RECOMPUTE_COSTS[name](self, step, s, forward) for name in self.setting.choices.recomputed)
        waiting = sum(t.bytes for t in step.saved if t.fate == "offloaded") / self.gpu.host_link
        return min(again, forward.all) + 2 * max(0.0, waiting - forward.device)

    def norm(self, step: StepCount, s: RankShapes, forward: OpSeconds) -> float:
        return 4.0 * s.T * s.D / self.stream if step.name in ("attend", "route", "mlp") else 0.0

    def up(self, step: StepCount, s: RankShapes, forward: OpSeconds) -> float:
        """Queries, keys and values from their latents."""
        if step.name != "attend" or not s.mla:
            return 0.0
        up = [g for g in step.gemms if g.name in ("query", "key", "value")]
        products = sum(self.product(g, g.rows * g.k + g.n * g.k, 2 * g.rows * g.n) for g in up)
        return products + 2.0 * pointwise.attention_elements(s) / self.stream + forward.host / 2

    def add_fsdp_exchange(self, piece: str, layer: int, passes: PassSeconds) -> PassSeconds:
        """Fully sharded: weights are gathered before a forward and a backward, gradients scattered after it, each
        while the neighbouring layer computes."""
        s = self.setting
        if s.choices.sharding != "fsdp":
            return passes
        held = count_piece(s.config.model, piece, layer, s.portion, s.choices).parameters
        gather = self.cluster.exchange(held, s, s.choices.recipe.wide)
        scatter = self.cluster.exchange(held, s, STATE_ELEMENT_BYTES[s.config.optim.gradient_reduce])
        F, D, W = passes
        before, behind = max(0.0, gather - F.compute), max(0.0, gather + scatter - D.compute - W.compute)
        return PassSeconds(F._replace(joined=F.joined + before), D._replace(joined=D.joined + behind), W)


RecomputeCost = Callable[[StepClock, StepCount, RankShapes, OpSeconds], float]


def repeated_forward(*names: str) -> RecomputeCost:
    """The forward of these steps, all of it."""
    return lambda pace, step, s, forward: forward.all if step.name in names else 0.0


RECOMPUTE_COSTS: dict[str, RecomputeCost] = {
    "norm": StepClock.norm,
    "up": StepClock.up,
    "core": lambda pace, step, s, forward: forward.attention,
    "out": lambda pace, step, s, forward: 0.0,  # only what it reads is wanted, and that is kept
    "mlp": repeated_forward("mlp"),
    "shared": repeated_forward("shared"),
    "activation": lambda pace, step, s, f: (
        2.0 * pointwise.activation_elements(s) / pace.stream if step.name == "experts" else 0.0
    ),
    "experts": repeated_forward("experts"),
    "moe": repeated_forward("route", "narrow", "dispatch", "shared", "experts", "combine", "widen"),
    "layer": lambda pace, step, s, forward: 0.0 if step.name in ("embed", "predict") else forward.all,
}
