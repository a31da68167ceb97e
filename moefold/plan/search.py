"""Search for the best layouts of a model, a cluster and a batch.

All values are tried of every degree that the user did not set. A layout that a rule of `config/rules.py` forbids is
refused under that rule's name. A layout that does not fit the GPU's memory, even with all recompute, is refused with
the memory it needs. The other layouts are simulated in the order of the lower bounds of their times, until the bound of
the next one exceeds the last time that is shown: nothing faster is passed over.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import NamedTuple

from moefold.anatomy.frozen_base import base_products
from moefold.anatomy.stage_contents import pair_kind
from moefold.config.errors import UserError
from moefold.config.memory_regions import REGIONS
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES
from moefold.config.run import Config
from moefold.kernels.facts import shares_sequences
from moefold.plan.launch import with_planned_memory
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import GIB, RankMemory, RunSetting, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.options import RECOMPUTE_LADDER, PlanChoices
from moefold.plan.request import with_dispatcher
from moefold.plan.time.cheapest_context import cheapest_context, with_context
from moefold.plan.time.closed_form import (
    PieceKind,
    PipelineCut,
    StageMemory,
    StageSeconds,
    closed_form_setting,
    cut_pipeline,
    least_rank_gib,
    least_step_seconds,
    measure_piece,
    measure_stages,
    time_piece,
    time_stages,
)
from moefold.plan.time.dynamic_step import time_step
from moefold.plan.time.simulate_step import StepTime
from moefold.plan.time.step_times import StepClock

FEWEST_TOKENS = 512  # per rank and microbatch: with fewer, launch latency is all of the time
MOST_TOKENS = 16_384  # a larger microbatch makes no kernel faster
MOST_PIPELINE = 64
MOST_TENSOR = 8
CONTEXT_TOKENS = 4096  # least tokens of a context-parallel rank
VPP_CHOICES = (1, 2, 3, 4, 6, 8, 12)
MICRO_BATCH_CHOICES = (1, 2, 4, 8)
WORTHWHILE_GIB = 0.5  # a further point of the Pareto front needs so much less memory

CacheKey = tuple[object, ...]
NO_KEYS: frozenset[str] = frozenset()
NO_RUNGS: frozenset[int] = frozenset()
RECOMPUTE_RULES = [rule for rule in RULES if "memory.recompute" in rule.reads]
FixedKeys = frozenset[str]  # keys of a configuration that a search leaves as they are


@dataclass(frozen=True)
class Candidate:
    """A legal layout whose least memory fits, with the cheapest `rung` of the recompute ladder on which it does, of
    those that were not `tried` before. Seconds and GiB are lower bounds."""

    config: Config
    choices: PlanChoices
    seconds: float
    gib: float
    rung: int
    tried: frozenset[int]

    @property
    def kind(self) -> tuple[bool, int]:
        return self.config.pipeline.pair, self.rung


@dataclass(frozen=True)
class RankedLayout:
    """A simulated layout that fits on every rank."""

    config: Config
    choices: PlanChoices
    time: StepTime
    memory: list[RankMemory]

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def largest_gib(self) -> float:
        return fullest_rank(self.memory).needed / GIB


@dataclass(frozen=True)
class MisfitLayout:
    """A legal layout that does not fit, with the least memory that it needs."""

    config: Config
    choices: PlanChoices
    gib: float


class Refusals:
    """Refused layouts: their number by reason, with one example each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}
        self.nearest: MisfitLayout | None = None  # to fitting

    def add_refusal(self, reason: str, example: str) -> None:
        count = self.counts.get(reason, 0)
        self.counts[reason] = count + 1
        self.examples.setdefault(reason, example)

    def add_misfit(self, misfit: MisfitLayout, limit: float) -> None:
        """Count a layout that does not fit; the example is the one nearest to fitting."""
        earlier = self.counts.get("memory", 0)
        self.counts["memory"] = earlier + 1
        if self.nearest is None or misfit.gib < self.nearest.gib:
            self.nearest = misfit
            layout = describe_layout(misfit.config)
            if misfit.choices.recompute:
                layout += f", recompute {','.join(misfit.choices.recompute)}"
            need = f"{layout} needs {misfit.gib:.1f} GiB"
            self.examples["memory"] = f"nearest to fitting: {need}, the GPU has {limit:.1f}"

    def by_count(self) -> list[tuple[str, int]]:
        """Reasons with their counts, the most frequent first."""
        items = self.counts.items()
        return sorted(items, key=lambda item: -item[1])


@dataclass(frozen=True)
class SearchResult:
    """Result of a search, all of it simulated. `layouts`: best first; `pareto_front`: layouts that no other beats in
    memory and speed, the fastest first."""

    layouts: list[RankedLayout]
    pareto_front: list[RankedLayout]
    refusals: Refusals
    layouts_tried: int


def divisors(n: int) -> list[int]:
    candidates = range(1, n + 1)
    return [d for d in candidates if n % d == 0]


def powers_of_two(most: int) -> list[int]:
    powers: list[int] = []
    power = 1
    while power <= most:
        powers.append(power)
        power *= 2
    return powers


def degree_combinations(base: Config, world: int, gpu: Gpu, fixed: FixedKeys) -> Iterator[Config]:
    """Combinations of the degrees that are not fixed, if they divide the world; rules check the rest."""
    p = base.parallel
    experts = base.model.moe.experts
    tensor_degrees = powers_of_two(min(MOST_TENSOR, gpu.domain))
    most_context = base.data.seq_len // CONTEXT_TOKENS
    context_degrees = powers_of_two(max(1, most_context))
    pipeline_degrees = [pp for pp in divisors(world) if pp <= MOST_PIPELINE]

    def choose(key: str, choices: Sequence[int]) -> Sequence[int]:
        if f"parallel.{key}" in fixed:
            return [getattr(p, key)]
        return choices

    for pp in choose("pp", pipeline_degrees):
        ranks = world // pp
        expert_degrees = [ep for ep in divisors(experts) if ranks % ep == 0]
        grids = product(
            choose("tp", tensor_degrees),
            choose("cp", context_degrees),
            choose("ep", expert_degrees),
            choose("etp", tensor_degrees),
        )
        # Dense and expert degrees each have to divide the ranks of a stage.
        for tp, cp, ep, etp in grids:
            dense_ranks = tp * cp
            expert_ranks = ep * etp
            if ranks % dense_ranks or ranks % expert_ranks:
                continue
            if "parallel.etp" in fixed or spreads_whole_experts(base, ep, etp):
                parallel = replace(p, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
                yield replace(base, parallel=parallel)


def spreads_whole_experts(base: Config, ep: int, etp: int) -> bool:
    """Whether experts are sharded only where each ep rank holds one: the same memory with less communication."""
    return etp == 1 or ep == base.model.moe.experts


def pipeline_variants(config: Config, fixed: FixedKeys) -> Iterator[Config]:
    """Variants of one grid: stages per rank, sequences per microbatch, and pairing."""
    p = config.parallel
    sends_rows = p.ep * p.etp > 1
    stage_counts = vpp_choices(config, fixed)
    micro_batches = micro_batch_choices(config, fixed)
    pairings = pairing_choices(config, fixed)
    for vpp, micro_batch, pair in product(stage_counts, micro_batches, pairings):
        if pair and not sends_rows:
            continue  # there is no communication to overlap
        pipeline = replace(config.pipeline, vpp=vpp, pair=pair)
        train = replace(config.train, micro_batch=micro_batch)
        yield replace(config, pipeline=pipeline, train=train)


def vpp_choices(config: Config, fixed: FixedKeys) -> list[int]:
    if "pipeline.vpp" in fixed:
        return [config.pipeline.vpp]
    pp = config.parallel.pp
    if pp == 1:
        return [1]
    pieces = config.model.layers + config.model.mtp + 2
    return [vpp for vpp in VPP_CHOICES if pp * vpp <= pieces]


def micro_batch_choices(config: Config, fixed: FixedKeys) -> list[int]:
    if "train.micro_batch" in fixed:
        return [config.train.micro_batch]
    p = config.parallel
    ranks = p.tp * p.cp
    tokens = config.data.seq_len // ranks
    larger = [size for size in MICRO_BATCH_CHOICES if size * tokens <= MOST_TOKENS]
    return larger or [1]


def pairing_choices(config: Config, fixed: FixedKeys) -> list[bool]:
    is_given = "pipeline.pair" in fixed or pair_kind(config.pipeline) == "alike"
    if is_given:
        return [config.pipeline.pair]
    return [False, True]


class LayoutSearch:
    """A search over layouts. Candidates share cached costs of pieces, dispatchers, context mechanisms and cuts of the
    model."""

    def __init__(self, world: int, gpu: Gpu, choices: PlanChoices, fixed: FixedKeys):
        self.world = world
        self.gpu = gpu
        self.fixed = fixed
        self.cluster = Cluster(gpu, world)
        rungs = RECOMPUTE_LADDER
        if "recompute" in fixed:
            rungs = (choices.recompute,)
        self.ladder = [replace(choices, recompute=rung) for rung in rungs]
        self.seconds_cache = defaultdict[CacheKey, dict[PieceKind, StageSeconds]](dict)
        self.memory_cache = defaultdict[CacheKey, dict[PieceKind, StageMemory]](dict)
        self.dispatcher_cache: dict[CacheKey, str] = {}
        self.context_cache: dict[CacheKey, str] = {}
        self.cut_cache: dict[tuple[int, int], PipelineCut] = {}
        self.refusals = Refusals()
        self.layouts_tried = 0

    def pipeline_cut(self, config: Config) -> PipelineCut:
        key = (config.parallel.pp, config.pipeline.vpp)
        if key not in self.cut_cache:
            self.cut_cache[key] = cut_pipeline(config)
        return self.cut_cache[key]

    def stage_seconds(self, s: RunSetting, cut: PipelineCut) -> list[StageSeconds]:
        """Seconds do not depend on the pipeline, unless weights are gathered (FSDP)."""
        fsdp_ranks = 0
        if s.choices.sharding == "fsdp":
            fsdp_ranks = s.degrees["dp"]
        grid = grid_cache_key(s.config)
        key = (*grid, s.choices.recompute, fsdp_ranks)
        seconds = self.seconds_cache[key]
        missing = [kind for kind in cut.kinds if kind not in seconds]
        if missing:
            clock = StepClock(s, self.gpu)
            for kind in missing:
                seconds[kind] = time_piece(clock, kind)
        return time_stages(cut, seconds)

    def stage_memory(self, s: RunSetting, cut: PipelineCut) -> list[StageMemory]:
        portion = s.portion
        of_pipeline = (portion.defers_wgrad, portion.accumulates)
        grid = grid_cache_key(s.config)
        key = (*grid, s.choices.recompute, *of_pipeline)
        memory = self.memory_cache[key]
        for kind in cut.kinds:
            if kind not in memory:
                memory[kind] = measure_piece(s, kind)
        return measure_stages(cut, memory)

    def with_chosen_dispatcher(self, config: Config) -> Config:
        key = grid_cache_key(config)
        if key not in self.dispatcher_cache:
            least_recompute = self.ladder[0]
            chosen, _ = with_dispatcher(config, least_recompute, self.gpu, self.world)
            dispatcher = chosen.parallel.dispatcher
            self.dispatcher_cache[key] = dispatcher
        dispatcher = self.dispatcher_cache[key]
        parallel = replace(config.parallel, dispatcher=dispatcher)  # pyright: ignore[reportArgumentType]
        return replace(config, parallel=parallel)

    def with_chosen_context(self, config: Config) -> Config:
        """The configuration with the mechanism of context parallelism of least predicted time, unless one was set."""
        p = config.parallel
        is_set = p.context != "auto" and "parallel.context" in self.fixed
        if is_set or not shares_sequences(config):
            return config
        key = (p.tp, p.cp, p.pp, config.train.micro_batch)
        if key not in self.context_cache:
            self.context_cache[key] = cheapest_context(config, self.ladder[0], self.gpu, self.world)
        return with_context(config, self.context_cache[key])

    def is_legal(self, config: Config) -> bool:
        case = ConfigOnRanks(config, self.world)
        for rule in RULES:
            if not rule.holds(case):
                example = rule.says(case)
                self.refusals.add_refusal(rule.name, example)
                return False
        cut_blocks = base_block_problem(config)
        if cut_blocks:
            self.refusals.add_refusal("blocks of lora.base", cut_blocks)
            return False
        microbatch_tokens = config.train.micro_batch * config.data.seq_len
        ranks_of_sequence = config.parallel.tp * config.parallel.cp
        tokens = microbatch_tokens / ranks_of_sequence
        if tokens < FEWEST_TOKENS:
            example = f"{tokens:g} tokens per rank and microbatch; expected at least {FEWEST_TOKENS}"
            self.refusals.add_refusal("tokens per rank", example)
            return False
        return True

    def feasible_candidates(self, base: Config) -> Iterator[Candidate]:
        for config in self.variants(base):
            self.layouts_tried += 1
            if not self.is_legal(config):
                continue
            candidate = self.fit_with_recompute(config)
            if candidate:
                yield candidate

    def variants(self, base: Config) -> Iterator[Config]:
        for grid in degree_combinations(base, self.world, self.gpu, self.fixed):
            for config in pipeline_variants(grid, self.fixed):
                yield self.with_chosen_context(config)

    def fit_with_recompute(self, config: Config, tried: frozenset[int] = NO_RUNGS) -> Candidate | None:
        """The layout with the recompute of least time whose least memory fits, of the rungs that were not tried."""
        layout = LayoutRungs(self, config)
        left = [rung for rung in range(len(self.ladder)) if rung not in tried]
        found = layout.first_fitting(left)
        if found is None:
            layout.report_misfit()
            return None
        rivals = [rung for rung in self.rivals_of(found) if rung in left and layout.fits(rung)]
        candidates = [layout.candidate(rung, tried) for rung in (found, *rivals)]
        return min(candidates, key=attrgetter("seconds"))

    def rivals_of(self, rung: int) -> list[int]:
        """The later rungs that may cost less than this one, since they do not recompute all of it."""
        less = self.ladder[rung]
        later = range(rung + 1, len(self.ladder))
        return [other for other in later if not recomputes_all_of(self.ladder[other], less)]

    def rank_candidate(self, candidate: Candidate) -> RankedLayout | None:
        """The candidate simulated, if its memory in the whole program fits as well."""
        config = self.with_chosen_dispatcher(candidate.config)
        setting = build_run_setting(config, self.world, candidate.choices)
        memory = memory_by_rank(setting)
        fullest = fullest_rank(memory)
        needed = fullest.needed / GIB
        if needed > self.gpu.memory:
            misfit = MisfitLayout(candidate.config, candidate.choices, needed)
            self.refusals.add_misfit(misfit, self.gpu.memory)
            return None
        time = time_step(setting, self.gpu)
        return RankedLayout(candidate.config, candidate.choices, time, memory)

    def next_rung(self, candidate: Candidate) -> Candidate | None:
        """The candidate on another rung, if one is left that may fit."""
        tried = candidate.tried | {candidate.rung}
        if len(tried) == len(self.ladder):
            return None
        return self.fit_with_recompute(candidate.config, tried)


class LayoutRungs:
    """The rungs of the recompute ladder on one layout: whether the trainer has each, and what it needs."""

    def __init__(self, search: LayoutSearch, config: Config):
        self.search = search
        self.config = config
        self.limit = search.gpu.memory
        self.cut = search.pipeline_cut(config)
        self.dispatched = search.with_chosen_dispatcher(config)
        self.measured: dict[int, MeasuredRung] = {}
        self.legal: dict[int, bool] = {}

    def first_fitting(self, rungs: Sequence[int]) -> int | None:
        """The first of the rungs that the trainer has and that fits. Whole layers need least: where they do not fit,
        nothing does."""
        last = rungs[-1]
        has_layers = "layer" in self.search.ladder[last].recomputed
        if has_layers and not self.fits(rungs[0]) and self.measure(last).gib > self.limit:
            return None
        return next(filter(self.fits, rungs), None)

    def fits(self, rung: int) -> bool:
        return self.measure(rung).gib <= self.limit and self.is_legal(rung)

    def is_legal(self, rung: int) -> bool:
        """Whether the trainer has the recompute of a rung with this layout. Refusals are counted by rule."""
        if rung not in self.legal:
            self.legal[rung] = self.check_rules(self.search.ladder[rung])
        return self.legal[rung]

    def check_rules(self, choices: PlanChoices) -> bool:
        if not choices.recompute and not choices.offload:
            return True
        run = with_planned_memory(self.config, choices)
        case = ConfigOnRanks(run, self.search.world)
        for rule in RECOMPUTE_RULES:
            if not rule.holds(case):
                regions = ",".join(choices.recompute)
                reason = f"recompute {regions}: {rule.name}" if regions else rule.name
                self.search.refusals.add_refusal(reason, rule.says(case))
                return False
        return True

    def measure(self, rung: int) -> MeasuredRung:
        if rung not in self.measured:
            choices = self.search.ladder[rung]
            s = closed_form_setting(self.dispatched, self.search.world, choices)
            stages = self.search.stage_memory(s, self.cut)
            gib = least_rank_gib(s, self.cut, stages)
            self.measured[rung] = MeasuredRung(rung, s, stages, gib)
        return self.measured[rung]

    def candidate(self, rung: int, tried: frozenset[int]) -> Candidate:
        measured = self.measure(rung)
        s = measured.setting
        seconds = self.search.stage_seconds(s, self.cut)
        least = least_step_seconds(s, self.search.cluster, self.cut, seconds, measured.stages)
        choices = self.search.ladder[rung]
        return Candidate(self.config, choices, least, measured.gib, rung, tried)

    def report_misfit(self) -> None:
        """Count the layout with the least memory that a rung needs. One whose rungs fit but are refused is counted by
        rule."""
        too_large = [measured for measured in self.measured.values() if measured.gib > self.limit]
        if not too_large:
            return
        smallest = min(too_large, key=attrgetter("gib"))
        choices = self.search.ladder[smallest.rung]
        misfit = MisfitLayout(self.config, choices, smallest.gib)
        self.search.refusals.add_misfit(misfit, self.limit)


def recomputes_all_of(more: PlanChoices, less: PlanChoices) -> bool:
    """Whether every region that `less` recomputes is recomputed by `more`, by its name or inside another."""
    if "layer" in more.recomputed:
        return True
    outer = [REGIONS[name] for name in more.recomputed]
    for name in less.recomputed - more.recomputed:
        region = REGIONS[name]
        if not any(other.covers(region) for other in outer):
            return False
    return True


class MeasuredRung(NamedTuple):
    """A rung of the recompute ladder for one layout: memory of its distinct stages, and the least of the whole."""

    rung: int
    setting: RunSetting
    stages: list[StageMemory]
    gib: float


def grid_cache_key(config: Config) -> CacheKey:
    """The keys on which a rank's part of a layer depends, beside recompute."""
    p = config.parallel
    return p.tp, p.cp, p.context, p.ep, p.etp, config.train.micro_batch


def base_block_problem(config: Config) -> str:
    """A product whose inputs the layout cuts inside a block of `lora.base`; empty if there is none."""
    if config.lora.base == "plain":
        return ""
    try:
        base_products(config)
    except UserError as error:
        return error.problems[0]
    return ""


def describe_layout(config: Config) -> str:
    """tp 2, pp 4, ep 8, mbs 1, overlap"""
    parallel = config.parallel
    pipeline = config.pipeline
    degrees = {
        "tp": parallel.tp,
        "cp": parallel.cp,
        "pp": parallel.pp,
        "vpp": pipeline.vpp,
        "ep": parallel.ep,
        "etp": parallel.etp,
    }
    parts: list[str] = []
    for name, degree in degrees.items():
        if degree > 1 or name in ("tp", "pp", "ep"):
            parts.append(f"{name} {degree}")
    if parallel.cp > 1:
        parts.append(parallel.context)
    parts.append(f"mbs {config.train.micro_batch}")
    if pipeline.pair:
        parts.append("overlap")
    return ", ".join(parts)


def search_layouts(
    base: Config,
    world: int,
    choices: PlanChoices,
    gpu: Gpu,
    fixed: FixedKeys = NO_KEYS,
    best: int = 10,
) -> SearchResult:
    """The best layouts. Keys in `fixed` keep their values of `base`."""
    search = LayoutSearch(world, gpu, choices, fixed)
    candidates = list(search.feasible_candidates(base))
    race = LayoutRace(search, candidates, best)
    race.run()
    ranked = sorted(race.ranked, key=attrgetter("seconds"))
    front = find_pareto_front(ranked)
    return SearchResult(ranked[:best], front, search.refusals, search.layouts_tried)


class LayoutRace:
    """Simulation of candidates in the order of their lower bounds. A candidate is simulated if it may be among the
    best, if it may be on the Pareto front, or if it is the first of its kind (with or without overlap, rung of the
    recompute ladder). A layout that does not fit in simulation is queued again with more recompute."""

    def __init__(self, search: LayoutSearch, candidates: list[Candidate], best: int):
        self.search = search
        self.best = best
        self.queue: list[tuple[float, int, Candidate]] = []
        for number, candidate in enumerate(candidates):
            entry = candidate.seconds, number, candidate
            self.queue.append(entry)
        heapq.heapify(self.queue)
        self.ranked: list[RankedLayout] = []
        self.best_seconds: list[float] = []  # of the best so far, sorted
        self.kinds: set[tuple[bool, int]] = set()
        self.least_gib = math.inf

    def run(self) -> None:
        while self.queue:
            _, number, candidate = heapq.heappop(self.queue)
            if not self.may_be_shown(candidate):
                continue
            layout = self.search.rank_candidate(candidate)
            if layout:
                self.record(candidate, layout)
                continue
            retry = self.search.next_rung(candidate)
            if retry:
                entry = retry.seconds, number, retry
                heapq.heappush(self.queue, entry)

    def may_be_shown(self, candidate: Candidate) -> bool:
        if len(self.best_seconds) < self.best:
            return True
        if candidate.seconds < self.best_seconds[-1]:
            return True
        if candidate.kind not in self.kinds:
            return True
        return candidate.gib < self.least_gib - WORTHWHILE_GIB

    def record(self, candidate: Candidate, layout: RankedLayout) -> None:
        self.ranked.append(layout)
        self.kinds.add(candidate.kind)
        self.least_gib = min(self.least_gib, layout.largest_gib)
        insort(self.best_seconds, layout.seconds)
        del self.best_seconds[self.best :]


def find_pareto_front(ranked: list[RankedLayout]) -> list[RankedLayout]:
    """The layouts that need less memory than every faster one, of layouts with the fastest first."""
    front: list[RankedLayout] = []
    least_gib = math.inf
    for layout in ranked:
        if layout.largest_gib < least_gib:
            least_gib = layout.largest_gib
            front.append(layout)
    return front
