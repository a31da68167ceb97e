"""Communication times on a cluster of GPUs: ranks of one NVLink domain, and the seconds of a collective.

Ranks are ordered as in `layout/fold.py`: tp innermost, then cp, dp, and pp outermost; etp, ep, edp for experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moefold.anatomy.step_specs import dispatched_width
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.machine.fp8_rates import QUANTISE_SHARE
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import RunSetting
from moefold.plan.options import PlanChoices

ParameterCounts = Mapping[ParameterClass, float]

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
    def pointwise_bandwidth(self) -> float:
        """Memory bandwidth that pointwise kernels reach, in bytes/s."""
        return self.gpu.hbm * self.gpu.kernels.stream

    @property
    def quantise_bandwidth(self) -> float:
        """Memory bandwidth that quantisation to FP8 reaches, in bytes/s."""
        return self.gpu.hbm * QUANTISE_SHARE

    @property
    def nvlink_bandwidth(self) -> float:
        """NVLink bandwidth that collectives reach inside a domain, in bytes/s."""
        return NVLINK_EFFICIENCY * self.gpu.inside

    @property
    def link_bandwidths(self) -> price.LinkSpeeds:
        gpu = self.gpu
        return price.LinkSpeeds(gpu.inside, gpu.network, source=gpu.name)

    def ring_bandwidth(self, stride: int, ranks: int) -> float:
        """Bandwidth per rank of a ring over `ranks` ranks, `stride` apart, in bytes/s. Beyond a domain, all members in
        a domain send through their own network cards."""
        if stride * ranks <= self.domain:
            return self.nvlink_bandwidth
        members = max(1, self.domain // stride)
        return min(self.nvlink_bandwidth, members * self.gpu.network)

    def ring_seconds(self, sent: float, stride: int, ranks: int) -> float:
        """Seconds of an all-gather or reduce-scatter in which each rank sends `sent` bytes."""
        if not sent or ranks == 1:
            return 0.0
        return COLLECTIVE_LATENCY + sent / self.ring_bandwidth(stride, ranks)

    def neighbour_seconds(self, size: float, span: int) -> float:
        """Seconds of a message of `size` bytes to a neighbour in a group that spans `span` ranks."""
        bandwidth = self.gpu.network
        if span <= self.domain:
            bandwidth = self.nvlink_bandwidth
        return COLLECTIVE_LATENCY + size / bandwidth

    def exchange_seconds(self, parameters: ParameterCounts, s: RunSetting, element: float) -> float:
        """Seconds of an all-gather or reduce-scatter of parameters over the ranks that share them out, `element` bytes
        each."""
        in_two_levels = s.config.shard.sync == "hierarchical"
        seconds = 0.0
        for grid, ranks in sharing_ranks(s).items():
            size = element * parameters_of_grid(parameters, grid)
            seconds += self.share_seconds(size, ranks, in_two_levels)
        return seconds

    def share_seconds(self, size: float, ranks: SharingRanks, in_two_levels: bool) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes."""
        near = max(1, self.domain // ranks.stride)  # ranks of a domain
        nodes = ranks.shards // near
        if in_two_levels and near > 1 and nodes > 1:
            return self.two_level_seconds(size, near, nodes)
        sent = size * (ranks.shards - 1) / ranks.shards
        return self.ring_seconds(sent, ranks.stride, ranks.shards)

    def two_level_seconds(self, size: float, near: int, nodes: int) -> float:
        """Seconds of the same over `near` ranks on each of some nodes. While one bucket is sent inside nodes, the
        bucket before it is sent across them: the slower level counts."""
        if not size:
            return 0.0
        inside = size * (near - 1) / near
        across = size / near * (nodes - 1) / nodes
        slower = max(inside / self.nvlink_bandwidth, across / self.gpu.network)
        return 2 * COLLECTIVE_LATENCY + slower

    def copies_seconds(self, parameters: ParameterCounts, s: RunSetting, element: float) -> float:
        """Seconds of the sum of reduced gradients over copies of all shares (HSDP), once at the end of a step."""
        seconds = 0.0
        for grid, ranks in sharing_ranks(s).items():
            share = element * parameters_of_grid(parameters, grid) / ranks.shards
            sent = 2 * share * (ranks.copies - 1) / ranks.copies
            seconds += self.ring_seconds(sent, ranks.stride * ranks.shards, ranks.copies)
        return seconds

    def dispatch_seconds(self, config: Config, choices: PlanChoices) -> float:
        """Seconds of one dispatch or one combine of one row chunk, by the dispatcher that was set or by that of least
        predicted time. With etp, the all-gather of arrived rows over etp is included."""
        p = config.parallel
        if p.ep * p.etp == 1:
            return 0.0
        wide = choices.recipe.wide
        links = self.link_bandwidths
        one_way = price.predicted_one_way(config, self.domain, int(wide), links)
        name, seconds = one_way
        if p.etp == 1 or name == "all_gather":
            return seconds
        microbatch_tokens = config.train.micro_batch * config.data.seq_len
        tokens = microbatch_tokens / (p.cp * p.tp * p.row_chunks)
        row = wide * dispatched_width(config.model)
        top_k = config.model.moe.top_k
        gathered = row * tokens * top_k * (p.etp - 1)
        gather = self.ring_seconds(gathered, 1, p.etp)
        return seconds + gather if p.ep > 1 else gather


class SharingRanks(NamedTuple):
    """The ranks that share out the parameters of a grid: how far they lie apart, the number of shares, and the number
    of copies of all shares."""

    stride: int
    shards: int
    copies: int


def sharing_ranks(s: RunSetting) -> dict[str, SharingRanks]:
    """By grid. Replicas of a dense parameter lie tp ranks apart, those of an expert's ep x etp."""
    p = s.parallel
    strides = {"dense": p.tp, "expert": p.ep * p.etp}
    found: dict[str, SharingRanks] = {}
    for grid, stride in strides.items():
        shards = s.shards_of(grid)
        found[grid] = SharingRanks(stride, shards, s.replicas_of(grid) // shards)
    return found


def parameters_of_grid(parameters: ParameterCounts, grid: str) -> float:
    return sum(count for (of_grid, _), count in parameters.items() if of_grid == grid)
