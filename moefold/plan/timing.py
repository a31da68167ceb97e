"""How long one microbatch takes in each step of the model on one rank: forward, data gradient, weight gradient.

    kernels   products and attention on a soft roofline, pointwise passes by the memory's bandwidth
    host      launches beyond what the device is busy with; none where a graph replays the step
    joined    collectives of tensor and context parallelism, which stand in the way of the next kernel
    travel    experts' rows between ranks: the lane that weaving hides
    again     forwards that recompute repeats before the backward

A piece of a layout (E, d, t, m, L) costs the sum of its steps, a stage the sum of its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property

from moefold.anatomy.steps import StepSpec, block_steps, is_moe, steps_ahead, window_of
from moefold.config.run import Config
from moefold.plan.choices import Choices
from moefold.plan.comm import Cluster
from moefold.plan.hardware import Gpu
from moefold.plan.work import Product, Share, Work, share_of, work_of

TILE = 128  # rows of experts are worked on in tiles: half a one is empty for each expert
HEAD = 64  # width of a head at which attention's exponentials take as long as its products
BACKWARD_LAUNCHES = 1.5  # of a forward's; autograd launches more kernels, from C++


@dataclass(frozen=True)
class Seconds:
    """Of one op of one microbatch. `ideal` is what its FLOPs would take at the peak; it is contained in `kernels`."""

    ideal: float = 0.0
    kernels: float = 0.0
    host: float = 0.0
    joined: float = 0.0
    travel: float = 0.0
    again: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def compute(self) -> float:
        """What keeps the compute lane."""
        return self.kernels + self.host + self.joined + self.again


@dataclass(frozen=True)
class Passes:
    """The three ops of one microbatch through a piece."""

    F: Seconds = Seconds()
    D: Seconds = Seconds()
    W: Seconds = Seconds()

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.F + other.F, self.D + other.D, self.W + other.W)


def total(passes: Iterable[Passes]) -> Passes:
    return sum(passes, Passes())


@dataclass(frozen=True)
class Pace:
    """How fast this rank works: a configuration on a number of GPUs of a kind."""

    config: Config
    choices: Choices
    gpu: Gpu
    world: int
    priced: dict[tuple[bool, bool, int], Passes] = field(default_factory=dict)

    @cached_property
    def share(self) -> Share:
        return share_of(self.config, self.choices)

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.gpu, self.world)

    @cached_property
    def stream(self) -> float:
        return self.gpu.hbm * self.gpu.kernels.stream

    def product(self, q: Product, read: float, written: float) -> float:
        """Seconds of one product that reads operands of `read` elements and writes `written` bytes."""
        k, precision = self.gpu.kernels, self.choices.precision if q.low else "bf16"
        element = self.choices.recipe.linear if q.low else 2
        grouped = q.groups > 1
        rate = self.gpu.rate(precision) * (k.grouped if grouped else 1.0)
        flops = q.flops * (1 + q.groups * TILE / 2 / q.rows if grouped else 1.0)
        moved = (read * element + written) / self.gpu.hbm
        return ((flops / rate) ** k.blend + moved**k.blend) ** (1 / k.blend)

    def attention(self, w: Work, share: float, flops: float) -> float:
        if not w.context:
            return 0.0
        reached = w.sees / (w.sees + self.gpu.kernels.attention_half) * w.width / (w.width + HEAD)
        return flops / (self.gpu.peak["bf16"] * share * reached)

    def at_peak(self, w: Work) -> float:
        """Seconds of a forward's FLOPs at the peak of the recipe; attention's own peak is that of bf16."""
        flops = sum(q.flops for q in w.products) + 2 * w.context
        return flops / self.gpu.peak["fp8" if self.share.low else "bf16"]

    def host(self, w: Work, device: float, times: float) -> float:
        """Seconds in which the device waits for launches."""
        replayed = self.choices.graphs == "whole" or (self.choices.graphs == "static" and w.static)
        busy = 0.0 if replayed else times * (w.launches + w.looped) * self.gpu.host.launch
        return math.hypot(device, busy) - device

    def forward(self, w: Work) -> Seconds:
        k = self.gpu.kernels
        device = (
            sum(self.product(q, q.rows * q.k + q.weight, 2 * q.rows * q.n) for q in w.products)
            + self.attention(w, k.attention_forward, 2 * w.context)
            + (w.moved + w.quantised) / self.stream
            + w.launches * k.start
        )
        wait = self.gpu.host.sync if w.name == "dispatch" and self.choices.graphs != "whole" and self.far else 0.0
        joined = self.cluster.gather(w.gathered, self.config.parallel.tp) * 2 + self.ring(w, device)
        return Seconds(self.at_peak(w), device, self.host(w, device, 1.0) + wait, joined, self.travel(w))

    def backward(self, w: Work) -> tuple[Seconds, Seconds]:
        """Data gradient and weight gradient."""
        k, ideal = self.gpu.kernels, self.at_peak(w)
        low = self.choices.recipe.linear if self.share.low else 0.0
        gradients = sum((2 + 2 * low) * q.rows * q.n for q in w.products if q.low and low)
        data = (
            sum(self.product(q, q.rows * q.n + q.weight, 2 * q.rows * q.k) for q in w.products)
            + self.attention(w, k.attention_backward, 5 * w.context)
            + (2 * w.moved + gradients) / self.stream
            + BACKWARD_LAUNCHES * w.launches * k.start
        )
        weight = sum(self.product(q, q.rows * (q.n + q.k), 8 * q.weight) for q in w.products)
        weight_share = sum(q.flops for q in w.products) / max(1.0, sum(q.flops for q in w.products) + 2 * w.context)
        joined = self.cluster.gather(w.gathered, self.config.parallel.tp) * 3 + 2 * self.ring(w, data)
        waits = self.host(w, data + weight, BACKWARD_LAUNCHES)
        again = self.repeated(w)
        return (
            Seconds(ideal * (2 - weight_share), data, waits, joined, self.travel(w), again),
            Seconds(ideal * weight_share, weight),
        )

    @property
    def far(self) -> bool:
        p = self.config.parallel
        return p.ep * p.etp > 1

    def travel(self, w: Work) -> float:
        return self.cluster.dispatch(self.config) if w.name in ("dispatch", "combine") and self.far else 0.0

    def ring(self, w: Work, device: float) -> float:
        """Keys and values go round while attention works on those that are there."""
        p = self.config.parallel
        if not w.ring:
            return 0.0
        return max(0.0, self.cluster.pass_on(w.ring * (p.cp - 1), p.tp * p.cp) - device)

    def repeated(self, w: Work) -> float:
        """What recompute adds to a backward of this step."""
        return sum(REPEATS[name](self, w) for name in self.choices.recomputed)

    def norm(self, w: Work) -> float:
        h = 4.0 * self.config.model.hidden * self.share.tokens
        return h / self.stream if w.name in ("attend", "route", "mlp") else 0.0

    def up_projection(self, w: Work) -> float:
        if w.name != "attend" or self.config.model.attention.kind != "mla":
            return 0.0
        up = [q for q in w.products if q.k < self.config.model.hidden and q.n > q.k]
        wait = 0.0 if self.choices.graphs != "none" else 8 * self.gpu.host.launch
        return sum(self.product(q, q.rows * q.k + q.weight, 2 * q.rows * q.n) for q in up) + wait + w.moved / self.stream

    def whole(self, *names: str) -> Callable[[Work], float]:
        def seconds(w: Work) -> float:
            if names and w.name not in names:
                return 0.0
            f = self.forward(w)
            return f.compute + f.travel

        return seconds


REPEATS: dict[str, Callable[[Pace, Work], float]] = {
    "norm": Pace.norm,
    "up": Pace.up_projection,
    "activation": lambda pace, w: w.moved / pace.stream if w.name == "experts" else 0.0,
    "mlp": lambda pace, w: pace.whole("mlp")(w),
    "shared": lambda pace, w: pace.whole("shared")(w),
    "experts": lambda pace, w: pace.whole("experts")(w),
    "out": lambda pace, w: 0.0,
    "moe": lambda pace, w: pace.whole("route", "dispatch", "shared", "experts", "combine")(w),
    "core": lambda pace, w: pace.attention(w, pace.gpu.kernels.attention_forward, 2 * w.context),
    "layer": lambda pace, w: pace.whole()(w),
}


def pass_step(pace: Pace, step: StepSpec) -> Passes:
    work = work_of(step, pace.share)
    return Passes(pace.forward(work), *pace.backward(work))


def layer_passes(pace: Pace, layer: int) -> Passes:
    """Layers that are alike are priced once. Behind the model's own come those that look ahead."""
    model = pace.config.model
    ahead = layer >= model.layers
    alike = (ahead, is_moe(model, layer), window_of(model, layer))
    if alike not in pace.priced:
        steps = steps_ahead(model, layer - model.layers) if ahead else block_steps(model, layer)
        pace.priced[alike] = total(pass_step(pace, step) for step in steps)
    return pace.priced[alike]
