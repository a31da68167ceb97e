"""A run on so many ranks under a plan's choices, and what follows from it: degrees, microbatches, portions, loads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt
from statistics import NormalDist

from moefold.config.run import Config
from moefold.dispatch.price import cheapest_dispatcher
from moefold.plan.layer.rank_shapes import RankPortion, make_rank_portion
from moefold.plan.memory.live_microbatches import RankMoments, moments_by_rank
from moefold.plan.options import PlanChoices

GIB = 2**30
CUDA_CONTEXT_BYTES = 0.6 * GIB  # of CUDA itself, and its kernels
NCCL_GROUP_BYTES = 0.15 * GIB  # of NCCL, for each axis that talks


@dataclass(frozen=True)
class RunSetting:
    """A run on so many ranks under these choices, and what follows from it."""

    config: Config
    world: int
    choices: PlanChoices
    portion: RankPortion
    moments: list[RankMoments]
    microbatches: int

    @cached_property
    def degrees(self) -> dict[str, int]:
        p = self.config.parallel
        dense, expert = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
        return {**self.portion.degrees, "dp": max(1, self.world // dense), "edp": max(1, self.world // expert)}

    @property
    def grows(self) -> bool:
        """Whether gradients come one after the other while activations go: this trainer makes them when backward
        reaches them, and a second microbatch finds them there."""
        p, c = self.config.parallel, self.choices
        return c.stack == "moefold" and self.microbatches == 1 and p.pp * self.config.pipeline.vpp == 1

    @cached_property
    def outside(self) -> float:
        """On the card, but out of torch's sight."""
        return CUDA_CONTEXT_BYTES + NCCL_GROUP_BYTES * sum(
            size > 1 for size in (*self.degrees.values(), self.config.parallel.pp)
        )

    @cached_property
    def load(self) -> float:
        """Rows of a rank's experts at the quantile, over their even share: experts differ by `spread`, of which a rank
        averages over those it holds, and chance does the rest. A rank that holds all experts has neither."""
        p, moe, c = self.portion, self.config.model.moe, self.choices
        if p.ep == 1 or c.spread == 0:
            return 1.0
        variance = c.spread**2 * p.ep / moe.experts + 1 / max(1.0, p.tokens * moe.top_k)
        return round(max(1.0, 1 + normal_deviations(c.quantile) * sqrt((1 - 1 / p.ep) * variance)), 4)


@lru_cache(maxsize=64)
def normal_deviations(quantile: float) -> float:
    """How many standard deviations above the mean this quantile of a normal distribution lies."""
    return NormalDist().inv_cdf(quantile)


def microbatches_per_step(config: Config, world: int) -> int:
    """How many pass one pipeline in a step."""
    p, train = config.parallel, config.train
    dp = max(1, world // (p.tp * p.cp * p.pp))
    return max(1, train.global_batch // (dp * train.micro_batch))


def build_run_setting(config: Config, world: int, choices: PlanChoices) -> RunSetting:
    c = config.pipeline
    microbatches = microbatches_per_step(config, world)
    moments = moments_by_rank(c.schedule, config.parallel.pp, c.vpp, microbatches, c.pair, c.defer)
    dispatcher, _ = cheapest_dispatcher(config, choices.node, int(choices.recipe.wide))
    apart = (c.pair and c.fill) or any(each.separate_wgrad for each in moments)
    portion = make_rank_portion(config, dispatcher, apart, adds=microbatches > 1)
    return RunSetting(config, world, choices, portion, moments, microbatches)
