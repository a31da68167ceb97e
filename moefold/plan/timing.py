"""How long one microbatch takes in each step of the model on one rank: forward, data gradient, weight gradient.

    products, attention   arithmetic on a soft roofline: the FLOPs and bytes that `plan/counts.py` has
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

from moefold.anatomy.steps import window_of
from moefold.plan import traffic
from moefold.plan.comm import Cluster
from moefold.plan.counts import Gemm, StepCount, piece_count
from moefold.plan.fit import TILE, reached
from moefold.plan.hardware import Gpu, roofline
from moefold.plan.memory import BYTES, Setting
from moefold.plan.moefold_layers import on_hopper
from moefold.plan.sizes import Sizes
from moefold.plan.stage import Pieces

BACKWARD = 1.5  # launches of a backward, over those of a forward; autograd launches from C++
ON_HOPPER = (0.86, 200.0)  # of our attention's backward, as `plan/hardware.py` has them: by `moefold bench attention`


class Seconds(NamedTuple):
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


class Passes(NamedTuple):
    """The three ops of one microbatch through a step, a piece or a stage."""

    F: Seconds = Seconds()
    D: Seconds = Seconds()
    W: Seconds = Seconds()


def plus(a: Passes, b: Passes) -> Passes:
    return Passes(*(Seconds(*map(add, x, y)) for x, y in zip(a, b, strict=True)))


def total(passes: list[Passes]) -> Passes:
    found = Passes()
    for each in passes:
        found = plus(found, each)
    return found


class Pace:
    """How fast a rank of this setting works on this GPU. Pieces and stages are priced once."""

    def __init__(self, setting: Setting, gpu: Gpu):
        self.setting, self.gpu = setting, gpu
        self.pieces: dict[tuple[str, int], Passes] = {}
        self.stages: dict[Pieces, Passes] = {}

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

    def stage(self, pieces: Pieces) -> Passes:
        if pieces not in self.stages:
            self.stages[pieces] = total([self.piece(*each) for each in pieces])
        return self.stages[pieces]

    def piece(self, piece: str, layer: int) -> Passes:
        if (piece, layer) not in self.pieces:
            self.pieces[piece, layer] = self.with_gathers(piece, layer, total(list(self.steps(piece, layer).values())))
        return self.pieces[piece, layer]

    def steps(self, piece: str, layer: int) -> dict[str, Passes]:
        """Every step of a piece by its name."""
        s = self.setting
        model = s.config.model
        sizes = Sizes(model, s.portion, s.choices, window_of(model, layer))
        counts = piece_count(model, piece, layer, s.portion, s.choices)
        return {step.name: self.step(step, sizes) for step in counts.steps}

    def step(self, step: StepCount, s: Sizes) -> Passes:
        forward = self.forward(step, s)
        data, weight = self.backward(step, s)
        return Passes(forward, data._replace(memory=self.repeated(step, s, forward)), weight)

    def forward(self, step: StepCount, s: Sizes) -> Seconds:
        k, (launches, looped) = self.gpu.kernels, traffic.launched(step.name, step.gemms, s)
        products = sum(self.product(g, g.rows * g.k + g.n * g.k, 2 * g.rows * g.n) * g.times for g in step.gemms)
        attention = self.attention(step, s, step.attention, k.attention_forward, k.forward_half)
        passes = (traffic.moved(step.name, s) + traffic.quantised(step.gemms, s)) / self.stream + launches * k.start
        device = products + attention + passes
        return Seconds(
            self.ideal(step),
            products,
            attention,
            passes,
            self.host(step, device, launches + looped) + self.waits(step),
            self.joined(step, "forward", attention),
            0.0,
            self.travel if step.spec.lane == "comm" else 0.0,
        )

    def backward(self, step: StepCount, s: Sizes) -> tuple[Seconds, Seconds]:
        """Data gradient and weight gradient. The weight gradient is added to fp32 sums: 8 bytes an element."""
        k, (launches, looped) = self.gpu.kernels, traffic.launched(step.name, step.gemms, s)
        products = sum(self.product(g, g.rows * g.n + g.n * g.k, 2 * g.rows * g.k) * g.times for g in step.gemms)
        ours = s.choices.stack == "moefold" and on_hopper(s)
        share, half = ON_HOPPER if ours else (k.attention_backward, k.backward_half)
        attention = self.attention(step, s, 2.5 * step.attention, share, half)
        moved = 2 * traffic.moved(step.name, s) + traffic.quantised(step.gemms, s, outputs=True)
        passes = moved / self.stream + BACKWARD * launches * k.start
        weights = sum(self.product(g, g.rows * (g.n + g.k), 8 * g.n * g.k) * g.times for g in step.gemms)
        ideal = self.ideal(step)
        of_weights = (
            ideal * sum(g.flops for g in step.gemms) / max(1.0, sum(g.flops for g in step.gemms) + step.attention)
        )
        device = products + attention + passes
        data = Seconds(
            2 * ideal - of_weights,
            products,
            attention,
            passes,
            self.host(step, device + weights, BACKWARD * (launches + looped)),
            self.joined(step, "backward", attention),
            0.0,
            self.travel if step.spec.lane == "comm" else 0.0,
        )
        return data, Seconds(of_weights, weights)

    def product(self, g: Gemm, read: float, written: float) -> float:
        """Seconds of `groups` products, each reading so many elements of operands and writing so many bytes."""
        k, choices = self.gpu.kernels, self.setting.choices
        low = g.kind in traffic.LOW
        rate = self.gpu.rate(choices.precision if low else "bf16")
        rows = g.rows
        if g.groups > 1:
            rate, rows = rate * k.grouped, g.rows + TILE / 2
        element = choices.recipe.linear if low else choices.recipe.wide
        seconds = 2 * rows * g.n * g.k * g.groups / rate
        moving = (read * element + written) * g.groups / self.gpu.hbm
        return roofline(seconds, moving, k.blend)

    def attention(self, step: StepCount, s: Sizes, flops: float, share: float, half: float) -> float:
        """A ring of cp ranks works on one chunk of keys at a time."""
        if not flops:
            return 0.0
        chunk = s.S / s.portion.cp
        sees = min(step.spec.window or chunk, chunk)
        rate = self.gpu.peak["bf16"] * share * reached(sees, (s.Q + s.V) / 2, half)
        return flops / rate

    def ideal(self, step: StepCount) -> float:
        """Seconds of a forward's FLOPs at the peak of the recipe."""
        return step.flops / self.gpu.peak_of(self.setting.choices.precision)

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
                seconds += self.cluster.ring(size, 1, p.tp)
            elif sent.axis == "cp":
                hidden = attention if p.context == "ring" else 0.0
                seconds += max(0.0, self.cluster.pass_on(size, p.tp * p.cp) - hidden)
        return seconds

    def repeated(self, step: StepCount, s: Sizes, forward: Seconds) -> float:
        """What recompute adds to the backward of this step, and offloading what compute does not hide."""
        again = sum(REPEATS[name](self, step, s, forward) for name in self.setting.choices.recomputed)
        waiting = sum(t.bytes for t in step.saved if t.fate == "offloaded") / self.gpu.host_link
        return min(again, forward.all) + 2 * max(0.0, waiting - forward.device)

    def norm(self, step: StepCount, s: Sizes, forward: Seconds) -> float:
        return 4.0 * s.T * s.D / self.stream if step.name in ("attend", "route", "mlp") else 0.0

    def up(self, step: StepCount, s: Sizes, forward: Seconds) -> float:
        """Queries, keys and values from their latents."""
        if step.name != "attend" or not s.mla:
            return 0.0
        up = [g for g in step.gemms if g.name in ("query", "key", "value")]
        products = sum(self.product(g, g.rows * g.k + g.n * g.k, 2 * g.rows * g.n) for g in up)
        return products + 2.0 * traffic.attended(s) / self.stream + forward.host / 2

    def with_gathers(self, piece: str, layer: int, passes: Passes) -> Passes:
        """Fully sharded: weights are gathered before a forward and a backward, gradients scattered after it, each
        while the neighbouring layer computes."""
        s = self.setting
        if s.choices.sharding != "fsdp":
            return passes
        held = piece_count(s.config.model, piece, layer, s.portion, s.choices).parameters
        gather = self.cluster.exchange(held, s, s.choices.recipe.wide)
        scatter = self.cluster.exchange(held, s, BYTES[s.config.optim.gradient_travel])
        F, D, W = passes
        before, behind = max(0.0, gather - F.compute), max(0.0, gather + scatter - D.compute - W.compute)
        return Passes(F._replace(joined=F.joined + before), D._replace(joined=D.joined + behind), W)


Repeat = Callable[[Pace, StepCount, Sizes, Seconds], float]


def whole(*names: str) -> Repeat:
    """The forward of these steps, all of it."""
    return lambda pace, step, s, forward: forward.all if step.name in names else 0.0


REPEATS: dict[str, Repeat] = {
    "norm": Pace.norm,
    "up": Pace.up,
    "core": lambda pace, step, s, forward: forward.attention,
    "out": lambda pace, step, s, forward: 0.0,  # only what it reads is wanted, and that is kept
    "mlp": whole("mlp"),
    "shared": whole("shared"),
    "activation": lambda pace, step, s, f: 2.0 * traffic.activated(s) / pace.stream if step.name == "experts" else 0.0,
    "experts": whole("experts"),
    "moe": whole("route", "narrow", "dispatch", "shared", "experts", "combine", "widen"),
    "layer": lambda pace, step, s, forward: 0.0 if step.name in ("embed", "predict") else forward.all,
}
