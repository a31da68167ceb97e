"""Full sharding, copies of shares and sums in two levels give what one rank gives, on any layout, and hold at most two
units whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from moefold.config.rules import check_config
from moefold.config.run import Config, MemoryConfig, ParallelConfig, PipelineConfig, ShardConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.parity import (
    TOLERANCE,
    TraceEntry,
    first_mismatch,
    random_corpus,
    shrink_config,
    single_rank_config,
    trace_one_step,
    trace_run,
)
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks
from tests.support.resident_weights import ResidentWeights, assemble_watched_run

STEPS = 2
Change = Callable[[Config], Config]


def base(config: Config) -> Config:
    """Shared experts, a dense layer, biases, norms over all heads."""
    attention = replace(config.model.attention, qk_norm="full", qkv_bias=True, out_bias=True)
    moe = with_moe_keys(config.model.moe, shared_ffn=16, dense_layers=1, aux_loss=0.1)
    return replace(config, model=replace(config.model, attention=attention, moe=moe))


def tied(config: Config) -> Config:
    return replace(base(config), model=replace(base(config).model, tied_head=True))


def ahead(config: Config) -> Config:
    """Latent attention and layers that look ahead, of which the first shares a step with the embedding."""
    return PRESETS["deepseek-v3-tiny"]()


def tied_ahead(config: Config) -> Config:
    config = ahead(config)
    return replace(config, model=replace(config.model, tied_head=True, mtp=2))


def documents(config: Config) -> Config:
    return replace(base(config), data=replace(config.data, attend="document"))


def muon(config: Config) -> Config:
    return replace(base(config), optim=replace(config.optim, rule="muon"))


def visiting(config: Config) -> Config:
    """Muon, whose states are in host memory between updates."""
    return replace(base(config), optim=replace(config.optim, rule="muon", states="host"))


def clipped(config: Config) -> Config:
    """Logits that are clipped in every step: projections are rescaled between update and gather."""
    attention = replace(config.model.attention, qk_norm="none")
    model = replace(config.model, attention=attention)
    return replace(config, model=model, optim=replace(config.optim, qk_clip=1e-3))


def surveyed(config: Config) -> Config:
    """A forward over the whole batch before each step."""
    return replace(
        base(config), model=replace(config.model, moe=with_moe_keys(config.model.moe, aux_over="global_batch"))
    )


class Recomputing:
    def __init__(self, *regions: str):
        self.regions = regions
        self.__name__ = f"recomputing {' '.join(regions)}"

    def __call__(self, config: Config) -> Config:
        return replace(base(config), memory=MemoryConfig(self.regions))


@dataclass(frozen=True)
class Case:
    """A layout on some ranks; `mode`, `replicas` and `sync` of its shares."""

    world: int
    change: Change = base
    mode: str = "zero3"
    replicas: int = 1
    sync: str = "flat"
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    layers: int | None = None

    def __str__(self) -> str:
        degrees = {name: getattr(self.parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
        beside = " ".join(f"{name}{size}" for name, size in degrees.items() if size > 1)
        schedule = f"{self.pipeline.schedule} vpp{self.pipeline.vpp}" if self.parallel.pp > 1 else ""
        passes = " ".join(name for name in ("pair", "defer") if getattr(self.pipeline, name))
        words = (self.mode, f"x{self.replicas}", self.sync, self.change.__name__, beside, schedule, passes)
        return " ".join(word for word in words if word)

    @property
    def config(self) -> Config:
        config = self.change(PRESETS["tiny"]())
        train = replace(config.train, precision="fp64")
        shard = ShardConfig(self.mode, self.replicas, self.sync)  # pyright: ignore[reportArgumentType]
        config = replace(config, train=train, shard=shard, parallel=self.parallel, pipeline=self.pipeline)
        small = shrink_config(config, self.world)
        model = replace(small.model, layers=self.layers or small.model.layers)
        layout = self.pipeline.layout
        return check_config(replace(small, model=model, pipeline=replace(small.pipeline, layout=layout)), self.world)


def on(
    world: int, change: Change = base, replicas: int = 1, mode: str = "zero3", sync: str = "flat", **degrees: Any
) -> Case:  # fmt: skip
    return Case(world, change, mode, replicas, sync, parallel=ParallelConfig(**degrees))


def on_nodes(world: int, change: Change = base, **keys: Any) -> Case:
    """Nodes of two ranks."""
    return on(world, change, sync="hierarchical", **keys)


def piped(world: int, pipeline: PipelineConfig, change: Change = base, layers: int = 4, **degrees: Any) -> Case:
    replicas = degrees.pop("replicas", 1)
    sync = degrees.pop("sync", "flat")
    parallel = ParallelConfig(**{"pp": 2, **degrees})
    return Case(world, change, "zero3", replicas, sync, pipeline, parallel, layers)


ON_FOUR = [
    on(4),
    on(4, tp=2),
    on(4, ep=2),
    on(4, ep=4, tp=2),
    on(4, ep=2, etp=2),
    on(4, etp=2, tp=2, cp=2, context="ring"),
    on(4, cp=2, context="ring", ep=2),
    on(4, replicas=2),
    on(4, replicas=2, cp=2, context="ring", ep=2),
    on(4, replicas=4),
    on(4, replicas=2, mode="zero1", ep=2),
    on(4, tied),
    on(4, tied, tp=2),
    on(4, ahead, ep=2),
    on(4, tied_ahead, replicas=2),
    on(4, documents, cp=2, context="all_gather"),
    on(4, muon, tp=2),
    on(4, muon, replicas=2, ep=2),
    on(4, visiting, tp=2, etp=2),
    on(4, surveyed),
    on(4, clipped, tp=2),
    on(4, Recomputing("layer")),
    on(4, Recomputing("moe", "norm"), ep=2, replicas=2),
    on(4, Recomputing("norm", "activation", "core"), tp=2),
    piped(4, PipelineConfig()),
    piped(4, PipelineConfig("interleaved", 2), tied),
    piped(4, PipelineConfig("zb_h1"), ep=2),
    piped(4, PipelineConfig("1f1b", pair=True), replicas=2),
    piped(4, PipelineConfig("zb_v", 2), Recomputing("layer")),
    piped(4, PipelineConfig("1f1b", layout="Ettt|tmL"), ahead),
    on_nodes(4),
    on_nodes(4, mode="zero1", ep=2),
    on_nodes(4, tied, mode="zero1", cp=2, context="ring"),
    on_nodes(4, muon, mode="zero1", etp=2),
    on_nodes(4, Recomputing("layer"), tp=2),
    on_nodes(4, visiting, ep=2),
]
ON_EIGHT = [
    on(8, ep=4),
    on(8, replicas=2, ep=2, etp=2, tp=2),
    on(8, documents, tp=2, cp=2, ep=2, context="all_to_all"),
    on(8, tied_ahead, replicas=2, ep=2, cp=2, context="ring"),
    on(8, Recomputing("layer"), ep=2, tp=2),
    piped(8, PipelineConfig("dualpipe_v", 2), ep=2, replicas=2),
    piped(8, PipelineConfig("1f1b", pair=True, defer=True), cp=2, context="ring", ep=2, dispatcher="dedup"),
    piped(8, PipelineConfig("gpipe", 1, layout="Ettt|mmL"), tied_ahead, layers=3, tp=2),
    on_nodes(8, replicas=2, ep=2),
    on_nodes(8, documents, mode="zero1", cp=2, ep=2, context="all_gather"),
    piped(8, PipelineConfig("1f1b", pair=True), sync="hierarchical"),
    piped(8, PipelineConfig("zb_h1"), visiting, replicas=2),
]

Found = tuple[list[TraceEntry], ResidentWeights]


def see(world: World, cases: list[Case]) -> list[Found]:
    """What this rank sees of each case, and the weights that it held meanwhile."""
    found: list[Found] = []
    for case in cases:
        config = case.config
        node_size = 2 if case.sync == "hierarchical" else 4
        shard = config.shard
        here = create_world(world.rank, world.size, world.device, config.parallel, node_size=node_size, shard=shard)
        run, weights = assemble_watched_run(config, here, random_corpus(config))
        seen: list[TraceEntry] = []
        with run.executor.observed_by(weights):
            for _ in range(STEPS):
                seen += trace_one_step(run)
        weights.forget_model()
        found.append((seen, weights))
    return found


def differences(cases: list[Case]) -> list[str]:
    (world,) = {case.world for case in cases}
    by_rank = run_ranks(see, world, cases)
    found = []
    for number, case in enumerate(cases):
        traces = [rank[number][0] for rank in by_rank]
        whole = trace_run(single_rank_config(case.config), single_rank_world(), STEPS)
        difference = first_mismatch(whole, traces, TOLERANCE["fp64"])
        if difference:
            found.append(f"{case}: {difference}")
        excesses = [rank[number][1].excess(case.config) for rank in by_rank]
        found += [f"{case}: {excess}" for excess in set(excesses) if excess]
    return found


def parts(cases: list[Case], count: int) -> list[list[Case]]:
    """Cases that run on the same processes; every part has some of each kind."""
    return [cases[first::count] for first in range(count)]


@pytest.mark.parametrize("cases", parts(ON_FOUR, 8), ids=lambda cases: f"from {cases[0]}")
def test_shares_on_four_ranks_agree_with_one_rank_and_two_units_are_whole_at_most(cases: list[Case]):
    found = differences(cases)
    assert not found, "\n".join(found)


@pytest.mark.extended
@pytest.mark.parametrize("cases", parts(ON_EIGHT, 4), ids=lambda cases: f"from {cases[0]}")
def test_shares_on_eight_ranks_agree_with_one_rank_and_two_units_are_whole_at_most(cases: list[Case]):
    found = differences(cases)
    assert not found, "\n".join(found)
