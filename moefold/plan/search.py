"""Search for the best layouts of a model, a cluster and a batch.

All values are tried of every degree that the user did not set. A layout that a rule of `config/rules.py` forbids is
refused under that rule's name. A layout that does not fit the GPU's memory, even with all recompute, is refused with
the memory it needs. The other layouts are ranked by the closed form, and the best few are simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES
from moefold.config.run import Config
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import GIB, RankMemory, RunSetting, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.options import PlanChoices
from moefold.plan.time.closed_form import (
    PieceKind,
    PieceMemories,
    PieceMemory,
    PiecePrice,
    PiecePrices,
    PipelineCut,
    closed_form_setting,
    cut_pipeline,
    estimate_step_seconds,
    largest_rank_gib,
    measure_piece_memory,
    price_piece,
)
from moefold.plan.time.simulate_step import StepTime, time_training_step
from moefold.plan.time.step_times import StepClock

RECOMPUTE_LADDER: tuple[tuple[str, ...], ...] = (  # recomputed regions, the cheapest first
    (),
    ("activation", "norm"),
    ("activation", "norm", "up", "mlp"),
    ("activation", "norm", "up", "mlp", "shared", "experts"),
    ("layer",),
)
FEWEST_TOKENS = 512  # per rank and microbatch: with fewer, launch latency is all of the time
MOST_TOKENS = 16_384  # a larger microbatch makes no kernel faster
MOST_PIPELINE = 64
MOST_TENSOR = 8
CONTEXT_TOKENS = 4096  # least tokens of a context-parallel rank
VPP_CHOICES = (1, 2, 3, 4, 6, 8, 12)
MICRO_BATCH_CHOICES = (1, 2, 4, 8)
SIMULATED_CANDIDATES = 8  # of the best by the closed form

CacheKey = tuple[object, ...]
NO_KEYS: frozenset[str] = frozenset()
FixedKeys = frozenset[str]  # keys of a configuration that a search leaves as they are


@dataclass(frozen=True)
class Candidate:
    """A legal layout that fits by the closed form, with the first `rung` of the recompute ladder on which it fits."""

    config: Config
    choices: PlanChoices
    setting: RunSetting
    seconds: float
    largest_gib: float
    rung: int


@dataclass(frozen=True)
class RankedLayout:
    """A simulated layout that fits on every rank."""

    config: Config
    choices: PlanChoices
    time: StepTime
    memory: list[RankMemory]

    @property
    def largest_gib(self) -> float:
        return fullest_rank(self.memory).total / GIB


class Refusals:
    """Refused layouts: their number by reason, with one example each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add_refusal(self, reason: str, example: str) -> None:
        count = self.counts.get(reason, 0)
        self.counts[reason] = count + 1
        self.examples.setdefault(reason, example)

    def by_count(self) -> list[tuple[str, int]]:
        """Reasons with their counts, the most frequent first."""
        items = self.counts.items()
        return sorted(items, key=lambda item: -item[1])


ParetoFront = list[tuple[float, float, Candidate]]  # GiB, tokens per second per GPU, layout


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. `layouts`: best first; `pareto_front`: layouts that no other beats in memory and speed."""

    layouts: list[RankedLayout]
    pareto_front: ParetoFront
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
    context_degrees = powers_of_two(max(1, base.data.seq_len // CONTEXT_TOKENS))
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
            if ranks % (tp * cp) or ranks % (ep * etp):
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
    tokens = config.data.seq_len // (p.tp * p.cp)
    larger = [size for size in MICRO_BATCH_CHOICES if size * tokens <= MOST_TOKENS]
    return larger or [1]


def pairing_choices(config: Config, fixed: FixedKeys) -> list[bool]:
    if "pipeline.pair" in fixed:
        return [config.pipeline.pair]
    return [False, True]


class LayoutSearch:
    """A search over layouts. Candidates share cached prices and memories of pieces, and cuts of the model."""

    def __init__(self, world: int, gpu: Gpu, choices: PlanChoices, fixed: FixedKeys):
        self.world = world
        self.gpu = gpu
        self.fixed = fixed
        self.cluster = Cluster(gpu, world)
        rungs = RECOMPUTE_LADDER
        if "recompute" in fixed:
            rungs = (choices.recompute,)
        self.ladder = [replace(choices, recompute=rung) for rung in rungs]
        self.price_cache: dict[CacheKey, dict[PieceKind, PiecePrice]] = {}
        self.memory_cache: dict[CacheKey, dict[PieceKind, PieceMemory]] = {}
        self.cut_cache: dict[tuple[int, int], PipelineCut] = {}
        self.refusals = Refusals()
        self.layouts_tried = 0

    def pipeline_cut(self, config: Config) -> PipelineCut:
        key = (config.parallel.pp, config.pipeline.vpp)
        if key not in self.cut_cache:
            self.cut_cache[key] = cut_pipeline(config)
        return self.cut_cache[key]

    def piece_prices(self, s: RunSetting, cut: PipelineCut) -> PiecePrices:
        """Prices of pieces. They do not depend on the pipeline, unless weights are gathered (FSDP)."""
        fsdp_ranks = 0
        if s.choices.sharding == "fsdp":
            fsdp_ranks = s.degrees["dp"]
        key = (*cost_cache_key(s), s.train.micro_batch, fsdp_ranks)
        prices = self.price_cache.setdefault(key, {})
        missing = [kind for kind in cut.kinds if kind not in prices]
        if missing:
            clock = StepClock(s, self.gpu)
            for kind in missing:
                prices[kind] = price_piece(clock, kind)
        return prices

    def piece_memories(self, s: RunSetting, cut: PipelineCut) -> PieceMemories:
        key = (*cost_cache_key(s), s.pipeline.pair)
        memories = self.memory_cache.setdefault(key, {})
        for kind in cut.kinds:
            if kind not in memories:
                memories[kind] = measure_piece_memory(s, kind)
        return memories

    def is_legal(self, config: Config) -> bool:
        case = ConfigOnRanks(config, self.world)
        for rule in RULES:
            if not rule.holds(case):
                self.refusals.add_refusal(rule.name, rule.says(case))
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
        grids = degree_combinations(base, self.world, self.gpu, self.fixed)
        for grid in grids:
            for config in pipeline_variants(grid, self.fixed):
                self.layouts_tried += 1
                if not self.is_legal(config):
                    continue
                candidate = self.fit_with_recompute(config)
                if candidate:
                    yield candidate

    def fit_with_recompute(self, config: Config, rung: int = 0) -> Candidate | None:
        """The layout with the least recompute that fits, from this rung on."""
        cut = self.pipeline_cut(config)

        def gib_needed(rung: int) -> float:
            s = closed_form_setting(config, self.world, self.ladder[rung])
            memories = self.piece_memories(s, cut)
            return largest_rank_gib(s, cut, memories)

        # A layout that does not fit on the last rung is refused; otherwise the first rung that fits is taken.
        limit = self.gpu.memory
        least = gib_needed(len(self.ladder) - 1)
        if least > limit:
            need = f"{describe_layout(config)} needs {least:.0f} GiB with full recompute"
            self.refusals.add_refusal("memory", f"{need}, the GPU has {limit:.0f}")
            return None
        while gib_needed(rung) > limit:
            rung += 1
        s = closed_form_setting(config, self.world, self.ladder[rung])
        prices = self.piece_prices(s, cut)
        memories = self.piece_memories(s, cut)
        seconds = estimate_step_seconds(s, self.cluster, cut, prices, memories)
        gib = gib_needed(rung)
        return Candidate(config, s.choices, s, seconds, gib, rung)

    def rank_candidate(self, candidate: Candidate) -> RankedLayout | None:
        """The candidate simulated, if its memory in the whole program fits as well."""
        setting = build_run_setting(candidate.config, self.world, candidate.choices)
        memory = memory_by_rank(setting)
        fullest = fullest_rank(memory)
        if fullest.total + fullest.outside > self.gpu.memory * GIB:
            layout = describe_layout(candidate.config)
            need = f"needs {fullest.total / GIB:.0f} GiB on rank {fullest.rank}"
            self.refusals.add_refusal("memory", f"{layout} {need}")
            return None
        time = time_training_step(setting, self.gpu)
        return RankedLayout(candidate.config, candidate.choices, time, memory)

    def next_rung(self, candidate: Candidate) -> Candidate | None:
        """The candidate with more recompute, if the ladder has a further rung."""
        rung = candidate.rung + 1
        if rung == len(self.ladder):
            return None
        return self.fit_with_recompute(candidate.config, rung)


def cost_cache_key(s: RunSetting) -> CacheKey:
    """The settings on which a rank's part of a layer depends, beside the sequences of a microbatch."""
    p = s.parallel
    return p.tp, p.cp, p.ep, p.etp, s.choices.recompute


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
    parts.append(f"mbs {config.train.micro_batch}")
    if pipeline.pair:
        parts.append("overlap")
    return ", ".join(parts)


def search_layouts(
    base: Config, world: int, choices: PlanChoices, gpu: Gpu, fixed: FixedKeys = NO_KEYS, best: int = 10
) -> SearchResult:
    """The best layouts. Keys in `fixed` keep their values of `base`. A layout that fits by the closed form but not in
    simulation is queued again with more recompute."""
    search = LayoutSearch(world, gpu, choices, fixed)
    candidates = list(search.feasible_candidates(base))
    candidates.sort(key=lambda candidate: candidate.seconds)
    # A sorted list is a heap; the number keeps the order of equal seconds.
    queue: list[tuple[float, int, Candidate]] = []
    for number, candidate in enumerate(candidates):
        queue.append((candidate.seconds, number, candidate))
    enough = max(best, SIMULATED_CANDIDATES)
    # The best by the closed form are simulated; a layout that does not fit is queued again with more recompute.
    ranked: list[RankedLayout] = []
    while queue and len(ranked) < enough:
        _, number, candidate = heapq.heappop(queue)
        layout = search.rank_candidate(candidate)
        if layout:
            ranked.append(layout)
            continue
        retry = search.next_rung(candidate)
        if retry:
            heapq.heappush(queue, (retry.seconds, number, retry))
    ranked.sort(key=lambda layout: layout.time.seconds)
    front = find_pareto_front(candidates, base, world)
    return SearchResult(ranked[:best], front, search.refusals, search.layouts_tried)


def find_pareto_front(candidates: list[Candidate], base: Config, world: int) -> ParetoFront:
    """The layouts that need less memory than every faster one. Candidates are sorted, the fastest first."""
    front: ParetoFront = []
    tokens = base.train.global_batch * base.data.seq_len / world
    least_gib = math.inf
    for candidate in candidates:
        if candidate.largest_gib < least_gib:
            least_gib = candidate.largest_gib
            front.append((least_gib, tokens / candidate.seconds, candidate))
    return front
