"""The best layouts for a model, a cluster and a batch.

Every degree that the user left open is tried. What a rule of `config/rules.py` forbids is left out with that rule's
name; what does not fit the card, even when more is recomputed, is left out with the bytes it lacks. The rest is ranked
by the closed form, and the best few are clocked by simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moefold.config.rules import RULES, ConfigOnRanks
from moefold.config.run import Config
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import GIB, RankMemory, RunSetting, build_run_setting, fullest_rank, memory_by_rank
from moefold.plan.options import PlanChoices
from moefold.plan.time.closed_form import (
    PieceKind,
    PieceMemory,
    PiecePrice,
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

RECOMPUTE_LADDER: tuple[tuple[str, ...], ...] = (  # what is recomputed, from the cheapest on
    (),
    ("activation", "norm"),
    ("activation", "norm", "up", "mlp"),
    ("activation", "norm", "up", "mlp", "shared", "experts"),
    ("layer",),
)
FEWEST_TOKENS = 512  # of a rank in a microbatch: below, nothing but launches would take time
MOST_TOKENS = 16_384  # above, a larger microbatch makes no kernel faster
MOST_PIPELINE = 64
SIMULATED_CANDIDATES = 8  # of the best, by simulation


@dataclass(frozen=True)
class Candidate:
    """A layout that is legal and fits, by the closed form, with so many rungs of recompute."""

    config: Config
    choices: PlanChoices
    setting: RunSetting
    seconds: float
    largest_gib: float
    rung: int


@dataclass(frozen=True)
class RankedLayout:
    """A layout whose every rank fits, clocked."""

    config: Config
    choices: PlanChoices
    time: StepTime
    memory: list[RankMemory]

    @property
    def largest_gib(self) -> float:
        return fullest_rank(self.memory).total / GIB


class Refusals:
    """Why layouts were left out: how many for each reason, with one example."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, example)


@dataclass(frozen=True)
class SearchResult:
    """`layouts` best first; `front` are (GiB, tokens a second of a GPU, layout) that none other beats in both."""

    layouts: list[RankedLayout]
    pareto_front: list[tuple[float, float, Candidate]]
    refusals: Refusals
    layouts_tried: int


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def powers_of_two(most: int) -> list[int]:
    return [2**at for at in range(most.bit_length()) if 2**at <= most]


def degree_combinations(base: Config, world: int, gpu: Gpu, fixed: frozenset[str]) -> Iterator[Config]:
    """Every combination of the degrees left open that fits the grids at all; rules look at the rest."""
    p, moe = base.parallel, base.model.moe

    def open_values(key: str, values: list[int], given: int) -> list[int]:
        return [given] if key in fixed else values

    for pp in open_values("parallel.pp", [d for d in divisors(world) if d <= MOST_PIPELINE], p.pp):
        ranks = world // pp
        for tp in open_values("parallel.tp", powers_of_two(min(8, gpu.domain)), p.tp):
            for cp in open_values("parallel.cp", powers_of_two(max(1, base.data.seq_len // 4096)), p.cp):
                for ep in open_values("parallel.ep", [d for d in divisors(moe.experts) if ranks % d == 0], p.ep):
                    for etp in open_values("parallel.etp", powers_of_two(min(8, gpu.domain)), p.etp):
                        whole = ranks % (tp * cp) == 0 and ranks % (ep * etp) == 0
                        if whole and ("parallel.etp" in fixed or spreads_whole_experts(base, ep, etp)):
                            yield replace(base, parallel=replace(p, pp=pp, tp=tp, cp=cp, ep=ep, etp=etp))


def spreads_whole_experts(base: Config, ep: int, etp: int) -> bool:
    """Whole experts are spread over ranks before any is cut: the same memory with less talk."""
    return etp == 1 or ep == base.model.moe.experts


def pipeline_variants(config: Config, fixed: frozenset[str]) -> Iterator[Config]:
    """One grid with its choices of stages a rank, sequences a microbatch, and pairing."""
    pp, c = config.parallel.pp, config.pipeline
    pieces = config.model.layers + config.model.mtp + 2
    chunks = [v for v in (1, 2, 3, 4, 6, 8, 12) if pp * v <= pieces] if pp > 1 else [1]
    tokens = config.data.seq_len // (config.parallel.tp * config.parallel.cp)
    sizes = [n for n in (1, 2, 4, 8) if n == 1 or n * tokens <= MOST_TOKENS]
    for vpp in [c.vpp] if "pipeline.vpp" in fixed else chunks:
        for mbs in [config.train.micro_batch] if "train.micro_batch" in fixed else sizes:
            for pair in [c.pair] if "pipeline.pair" in fixed else (False, True):
                if pair and config.parallel.ep * config.parallel.etp == 1:
                    continue  # nothing travels that could hide
                yield replace(
                    config,
                    pipeline=replace(c, vpp=vpp, pair=pair),
                    train=replace(config.train, micro_batch=mbs),
                )


class LayoutSearch:
    """Shares between candidates what they have in common: a piece's price, a cut of the model."""

    def __init__(self, world: int, gpu: Gpu, choices: PlanChoices, fixed: frozenset[str]):
        self.world, self.gpu, self.fixed = world, gpu, fixed
        self.cluster = Cluster(gpu, world)
        rungs = [choices.recompute] if "recompute" in fixed else RECOMPUTE_LADDER
        self.ladder = [replace(choices, recompute=rung) for rung in rungs]
        self.prices: dict[tuple[object, ...], dict[PieceKind, PiecePrice]] = {}
        self.holdings: dict[tuple[object, ...], dict[PieceKind, PieceMemory]] = {}
        self.cuts: dict[tuple[int, int], PipelineCut] = {}
        self.refusals = Refusals()
        self.layouts_tried = 0

    def cut(self, config: Config) -> PipelineCut:
        key = (config.parallel.pp, config.pipeline.vpp)
        if key not in self.cuts:
            self.cuts[key] = cut_pipeline(config)
        return self.cuts[key]

    def piece_prices(self, s: RunSetting, cut: PipelineCut) -> Mapping[PieceKind, PiecePrice]:
        """Pieces cost the same whatever the pipeline, unless their weights travel."""
        fsdp = s.degrees["dp"] if s.choices.sharding == "fsdp" else 0
        known = self.prices.setdefault((*cost_cache_key(s), s.config.train.micro_batch, fsdp), {})
        missing = [kind for kind in cut.kinds if kind not in known]
        if missing:
            pace = StepClock(s, self.gpu)
            known.update((kind, price_piece(pace, kind)) for kind in missing)
        return known

    def held(self, s: RunSetting, cut: PipelineCut) -> Mapping[PieceKind, PieceMemory]:
        known = self.holdings.setdefault((*cost_cache_key(s), s.config.pipeline.pair), {})
        known.update((kind, measure_piece_memory(s, kind)) for kind in cut.kinds if kind not in known)
        return known

    def legal(self, config: Config) -> bool:
        case = ConfigOnRanks(config, self.world)
        for rule in RULES:
            if not rule.holds(case):
                self.refusals.add(rule.name, rule.says(case))
                return False
        tokens = config.train.micro_batch * config.data.seq_len / (config.parallel.tp * config.parallel.cp)
        if tokens < FEWEST_TOKENS:
            self.refusals.add("tokens of a rank", f"{tokens:g} tokens a rank and microbatch; expected {FEWEST_TOKENS}")
            return False
        return True

    def feasible_candidates(self, base: Config) -> Iterator[Candidate]:
        for grid in degree_combinations(base, self.world, self.gpu, self.fixed):
            for config in pipeline_variants(grid, self.fixed):
                self.layouts_tried += 1
                if self.legal(config) and (found := self.fit_with_recompute(config)):
                    yield found

    def fit_with_recompute(self, config: Config, rung: int = 0) -> Candidate | None:
        """The layout with as little recomputed as fits, from this rung on."""
        cut = self.cut(config)

        def gib_needed(rung: int) -> float:
            s = closed_form_setting(config, self.world, self.ladder[rung])
            return largest_rank_gib(s, cut, self.held(s, cut))

        least = gib_needed(len(self.ladder) - 1)
        if least > self.gpu.memory:
            what = f"{describe_layout(config)} needs {least:.0f} GiB with all recomputed, the card has {self.gpu.memory:.0f}"
            self.refusals.add("memory", what)
            return None
        while gib_needed(rung) > self.gpu.memory:
            rung += 1
        s = closed_form_setting(config, self.world, self.ladder[rung])
        seconds = estimate_step_seconds(s, self.cluster, cut, self.piece_prices(s, cut), self.held(s, cut))
        return Candidate(config, s.choices, s, seconds, gib_needed(rung), rung)

    def exact_memory(self, candidate: Candidate) -> tuple[RunSetting, list[RankMemory]] | None:
        """The layout walked: its memory, if that fits as well."""
        setting = build_run_setting(candidate.config, self.world, candidate.choices)
        memory = memory_by_rank(setting)
        fullest = fullest_rank(memory)
        if fullest.total + fullest.outside <= self.gpu.memory * GIB:
            return setting, memory
        what = f"{describe_layout(candidate.config)} needs {fullest.total / GIB:.0f} GiB on rank {fullest.rank}"
        self.refusals.add("memory", what)
        return None


def cost_cache_key(s: RunSetting) -> tuple[object, ...]:
    """What a rank's share of a layer depends on, beside the sequences of a microbatch."""
    p = s.config.parallel
    return p.tp, p.cp, p.ep, p.etp, s.choices.recompute


def describe_layout(config: Config) -> str:
    p, c = config.parallel, config.pipeline
    degrees = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "vpp": c.vpp, "ep": p.ep, "etp": p.etp}
    said = [f"{name} {n}" for name, n in degrees.items() if n > 1 or name in ("tp", "pp", "ep")]
    return ", ".join([*said, f"mbs {config.train.micro_batch}", *(["overlap"] if c.pair else [])])


def search_layouts(
    base: Config, world: int, choices: PlanChoices, gpu: Gpu, fixed: frozenset[str] = frozenset(), best: int = 10
) -> SearchResult:
    """The best layouts; keys in `fixed` stay as they are in `base`. What fits by the closed form alone is tried again
    with more recomputed, in its new place among the others."""
    looking = LayoutSearch(world, gpu, choices, fixed)
    candidates = sorted(looking.feasible_candidates(base), key=lambda each: each.seconds)
    waiting = [(each.seconds, at, each) for at, each in enumerate(candidates)]  # sorted, so a heap
    ranked: list[RankedLayout] = []
    while waiting and len(ranked) < max(best, SIMULATED_CANDIDATES):
        _, at, each = heapq.heappop(waiting)
        if found := looking.exact_memory(each):
            setting, memory = found
            ranked.append(RankedLayout(each.config, each.choices, time_training_step(setting, gpu), memory))
        elif each.rung + 1 < len(looking.ladder) and (more := looking.fit_with_recompute(each.config, each.rung + 1)):
            heapq.heappush(waiting, (more.seconds, at, more))
    ranked.sort(key=lambda each: each.time.seconds)
    return SearchResult(
        ranked[:best], find_pareto_front(candidates, base, world), looking.refusals, looking.layouts_tried
    )


def find_pareto_front(candidates: list[Candidate], base: Config, world: int) -> list[tuple[float, float, Candidate]]:
    """Of layouts from the fastest on, those that need less memory than all faster ones."""
    front: list[tuple[float, float, Candidate]] = []
    tokens = base.train.global_batch * base.data.seq_len / world
    for each in candidates:
        if not front or each.largest_gib < front[-1][0]:
            front.append((each.largest_gib, tokens / each.seconds, each))
    return front
