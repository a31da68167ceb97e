"""How long messages take on a cluster of GPUs: which ranks share an NVLink domain, and what a collective costs there.

Ranks lie as `layout.fold` has them: tp innermost, then cp, then dp, and pp outermost; etp, ep, edp on the expert side.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.anatomy.steps import travelling_width
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.hardware import Gpu

START = 20e-6  # a collective or message inside a node
REACHED = 0.79  # share of NVLink's peak that collectives reach, as a plain all-to-all does


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    world: int

    @property
    def domain(self) -> int:
        return min(self.gpu.domain, self.world)

    def gather(self, size: float, ranks: int) -> float:
        """An all-gather or reduce-scatter of `size` bytes over neighbouring ranks."""
        if ranks == 1 or not size:
            return 0.0
        return START + size * (ranks - 1) / ranks / self.ring_rate(1, ranks)

    def ring_rate(self, stride: int, ranks: int) -> float:
        """Bytes a second of a ring over `ranks` that lie `stride` apart. Beyond a domain, the members of a domain send
        through all their network cards."""
        if stride * ranks <= self.domain:
            return REACHED * self.gpu.inside
        members = max(1, self.domain // stride)
        return min(REACHED * self.gpu.inside, members * self.gpu.network)

    def pass_on(self, size: float, span: int) -> float:
        """Bytes to a neighbour in a group that spans so many ranks."""
        return START + size / (REACHED * self.gpu.inside if span <= self.domain else self.gpu.network)

    def reduce(self, size: float, stride: int, ranks: int) -> float:
        """A reduce-scatter or all-gather of `size` bytes over `ranks` that lie `stride` apart."""
        return 0.0 if ranks == 1 else price.LATENCY + size * (ranks - 1) / ranks / self.ring_rate(stride, ranks)

    def dispatch(self, config: Config) -> float:
        """One way of experts' rows, by the dispatcher of least predicted time or the one asked for."""
        p = config.parallel
        links = price.Links(self.gpu.inside, self.gpu.network)
        name, seconds = price.one_way(config, self.domain, 2, links)
        if p.etp == 1 or name == "all_gather":
            return seconds
        tokens = config.train.micro_batch * config.data.seq_len / (p.cp * p.tp)
        rows = tokens * config.model.moe.top_k * p.etp
        return (seconds if p.ep > 1 else 0.0) + self.gather(2.0 * rows * travelling_width(config.model), p.etp)
