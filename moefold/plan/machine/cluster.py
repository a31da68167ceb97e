"""How long messages take on a cluster of GPUs: which ranks share an NVLink domain, and what a collective costs there.

Ranks lie as `layout.fold` has them: tp innermost, then cp, then dp, and pp outermost; etp, ep, edp on the expert side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moefold.anatomy.step_specs import dispatched_width
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import RunSetting
from moefold.plan.options import PlanChoices

COLLECTIVE_LATENCY = 20e-6  # of a collective or a message between neighbours
NVLINK_EFFICIENCY = 0.79  # share of NVLink's peak that collectives reach, as a plain all-to-all does


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
    def link_bandwidths(self) -> price.LinkSpeeds:
        return price.LinkSpeeds(self.gpu.inside, self.gpu.network)

    def achieved_rate(self, stride: int, ranks: int) -> float:
        """Bytes a second that a ring over `ranks` that lie `stride` apart sends from each. Beyond a domain, all members
        in a domain send through their own network cards."""
        if stride * ranks <= self.domain:
            return NVLINK_EFFICIENCY * self.gpu.inside
        members = max(1, self.domain // stride)
        return min(NVLINK_EFFICIENCY * self.gpu.inside, members * self.gpu.network)

    def ring_seconds(self, sent: float, stride: int, ranks: int) -> float:
        """A gather or scatter in which each rank sends so many bytes."""
        return COLLECTIVE_LATENCY + sent / self.achieved_rate(stride, ranks) if sent and ranks > 1 else 0.0

    def neighbour_seconds(self, size: float, span: int) -> float:
        """Bytes to a neighbour in a group that spans so many ranks."""
        return COLLECTIVE_LATENCY + size / (
            NVLINK_EFFICIENCY * self.gpu.inside if span <= self.domain else self.gpu.network
        )

    def exchange(self, parameters: Mapping[ParameterClass, float], s: RunSetting, each: float) -> float:
        """A gather or scatter of parameters over their replicas, `each` bytes a parameter."""
        p, d = s.config.parallel, s.degrees
        lies = {"dense": (p.tp, d["dp"] * p.cp), "expert": (p.ep * p.etp, d["edp"])}
        seconds = 0.0
        for grid, (stride, ranks) in lies.items():
            held = sum(n for (of, _), n in parameters.items() if of == grid)
            seconds += self.ring_seconds(each * held * (ranks - 1) / ranks, stride, ranks)
        return seconds

    def dispatch(self, config: Config, choices: PlanChoices) -> float:
        """One way of experts' rows, by the dispatcher of least predicted time or the one asked for; ranks that cut an
        expert among them then show each other what came."""
        p = config.parallel
        if p.ep * p.etp == 1:
            return 0.0
        name, seconds = price.predicted_one_way(config, self.domain, int(choices.recipe.wide), self.link_bandwidths)
        if p.etp == 1 or name == "all_gather":
            return seconds
        tokens = config.train.micro_batch * config.data.seq_len / (p.cp * p.tp)
        row = choices.recipe.wide * dispatched_width(config.model)
        shown = self.ring_seconds(row * tokens * config.model.moe.top_k * (p.etp - 1), 1, p.etp)
        return (seconds if p.ep > 1 else 0.0) + shown
