"""How long messages take on a cluster of GPUs: which ranks share an NVLink domain, and what a collective costs there.

Ranks lie as `layout.fold` has them: tp innermost, then cp, then dp, and pp outermost; etp, ep, edp on the expert side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moefold.anatomy.steps import travelling_width
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.choices import Choices
from moefold.plan.counts import Class
from moefold.plan.hardware import Gpu
from moefold.plan.memory import Setting

START = 20e-6  # of a collective or a message between neighbours
REACHED = 0.79  # share of NVLink's peak that collectives reach, as a plain all-to-all does


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    world: int

    @property
    def domain(self) -> int:
        return min(self.gpu.domain, self.world)

    @property
    def stream(self) -> float:
        """Bytes a second of pointwise work in a GPU's memory."""
        return self.gpu.hbm * self.gpu.kernels.stream

    @property
    def links(self) -> price.Links:
        return price.Links(self.gpu.inside, self.gpu.network)

    def rate(self, stride: int, ranks: int) -> float:
        """Bytes a second that a ring over `ranks` that lie `stride` apart sends from each. Beyond a domain, all members
        in a domain send through their own network cards."""
        if stride * ranks <= self.domain:
            return REACHED * self.gpu.inside
        members = max(1, self.domain // stride)
        return min(REACHED * self.gpu.inside, members * self.gpu.network)

    def ring(self, sent: float, stride: int, ranks: int) -> float:
        """A gather or scatter in which each rank sends so many bytes."""
        return START + sent / self.rate(stride, ranks) if sent and ranks > 1 else 0.0

    def pass_on(self, size: float, span: int) -> float:
        """Bytes to a neighbour in a group that spans so many ranks."""
        return START + size / (REACHED * self.gpu.inside if span <= self.domain else self.gpu.network)

    def exchange(self, parameters: Mapping[Class, float], s: Setting, each: float) -> float:
        """A gather or scatter of parameters over their replicas, `each` bytes a parameter."""
        p, d = s.config.parallel, s.degrees
        lies = {"dense": (p.tp, d["dp"] * p.cp), "expert": (p.ep * p.etp, d["edp"])}
        seconds = 0.0
        for grid, (stride, ranks) in lies.items():
            held = sum(n for (of, _), n in parameters.items() if of == grid)
            seconds += self.ring(each * held * (ranks - 1) / ranks, stride, ranks)
        return seconds

    def dispatch(self, config: Config, choices: Choices) -> float:
        """One way of experts' rows, by the dispatcher of least predicted time or the one asked for; ranks that cut an
        expert among them then show each other what came."""
        p = config.parallel
        if p.ep * p.etp == 1:
            return 0.0
        name, seconds = price.one_way(config, self.domain, int(choices.recipe.wide), self.links)
        if p.etp == 1 or name == "all_gather":
            return seconds
        tokens = config.train.micro_batch * config.data.seq_len / (p.cp * p.tp)
        row = choices.recipe.wide * travelling_width(config.model)
        shown = self.ring(row * tokens * config.model.moe.top_k * (p.etp - 1), 1, p.etp)
        return (seconds if p.ep > 1 else 0.0) + shown
