"""The best layouts for a model, a cluster and a batch.

Every degree that the user left open is tried. What a rule of `config/rules.py` forbids is left out with that rule's
name; what does not fit the card, even when more is recomputed, is left out with the bytes it lacks. The rest is ranked
by the closed form, and the best few are clocked by simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moefold.config.rules import RULES, Case
from moefold.config.run import Config
from moefold.plan.choices import Choices
from moefold.plan.comm import Cluster
from moefold.plan.estimate import (
    Cut,
    Held,
    Kind,
    Price,
    cut_of,
    held_of,
    largest_gib,
    plain_setting,
    price_of,
    step_seconds,
)
from moefold.plan.hardware import Gpu
from moefold.plan.memory import GIB, RankMemory, Setting, memory_in, setting_of, worst
from moefold.plan.simulate import StepTime, time_step
from moefold.plan.timing import Pace

LADDER: tuple[tuple[str, ...], ...] = (  # what is recomputed, from the cheapest on
    (),
    ("activation", "norm"),
    ("activation", "norm", "up", "mlp"),
    ("activation", "norm", "up", "mlp", "shared", "experts"),
    ("layer",),
)
FEWEST_TOKENS = 512  # of a rank in a microbatch: below, nothing but launches would take time
MOST_TOKENS = 16_384  # above, a larger microbatch makes no kernel faster
MOST_PIPELINE = 64
CLOCKED = 8  # of the best, by simulation


@dataclass(frozen=True)
class Candidate:
    """A layout that is legal and fits, by the closed form, with so many rungs of recompute."""

    config: Config
    choices: Choices
    setting: Setting
    seconds: float
    gib: float
    rung: int


@dataclass(frozen=True)
class Ranked:
    """A layout whose every rank fits, clocked."""

    config: Config
    choices: Choices
    time: StepTime
    memory: list[RankMemory]

    @property
    def gib(self) -> float:
        return worst(self.memory).total / GIB


class Refusals:
    """Why layouts were left out: how many for each reason, with one example."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, example)


@dataclass(frozen=True)
class Found:
    """`layouts` best first; `front` are (GiB, tokens a second of a GPU, layout) that none other beats in both."""

    layouts: list[Ranked]
    front: list[tuple[float, float, Candidate]]
    refusals: Refusals
    looked: int


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def powers(most: int) -> list[int]:
    return [2**at for at in range(most.bit_length()) if 2**at <= most]


def combinations(base: Config, world: int, gpu: Gpu, fixed: frozenset[str]) -> Iterator[Config]:
    """Every combination of the degrees left open that fits the grids at all; rules look at the rest."""
    p, moe = base.parallel, base.model.moe

    def open_or(key: str, values: list[int], given: int) -> list[int]:
        return [given] if key in fixed else values

    for pp in open_or("parallel.pp", [d for d in divisors(world) if d <= MOST_PIPELINE], p.pp):
        ranks = world // pp
        for tp in open_or("parallel.tp", powers(min(8, gpu.domain)), p.tp):
            for cp in open_or("parallel.cp", powers(max(1, base.data.seq_len // 4096)), p.cp):
                for ep in open_or("parallel.ep", [d for d in divisors(moe.experts) if ranks % d == 0], p.ep):
                    for etp in open_or("parallel.etp", powers(min(8, gpu.domain)), p.etp):
                        whole = ranks % (tp * cp) == 0 and ranks % (ep * etp) == 0
                        if whole and ("parallel.etp" in fixed or spread_first(base, ep, etp)):
                            yield replace(base, parallel=replace(p, pp=pp, tp=tp, cp=cp, ep=ep, etp=etp))


def spread_first(base: Config, ep: int, etp: int) -> bool:
    """Whole experts are spread over ranks before any is cut: the same memory with less talk."""
    return etp == 1 or ep == base.model.moe.experts


def variants(config: Config, fixed: frozenset[str]) -> Iterator[Config]:
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


class Search:
    """Shares between candidates what they have in common: a piece's price, a cut of the model."""

    def __init__(self, world: int, gpu: Gpu, choices: Choices, fixed: frozenset[str]):
        self.world, self.gpu, self.fixed = world, gpu, fixed
        self.cluster = Cluster(gpu, world)
        rungs = [choices.recompute] if "recompute" in fixed else LADDER
        self.ladder = [replace(choices, recompute=rung) for rung in rungs]
        self.prices: dict[tuple[object, ...], dict[Kind, Price]] = {}
        self.holdings: dict[tuple[object, ...], dict[Kind, Held]] = {}
        self.cuts: dict[tuple[int, int], Cut] = {}
        self.refusals = Refusals()
        self.looked = 0

    def cut(self, config: Config) -> Cut:
        key = (config.parallel.pp, config.pipeline.vpp)
        if key not in self.cuts:
            self.cuts[key] = cut_of(config)
        return self.cuts[key]

    def priced(self, s: Setting, cut: Cut) -> Mapping[Kind, Price]:
        """Pieces cost the same whatever the pipeline, unless their weights travel."""
        fsdp = s.degrees["dp"] if s.choices.sharding == "fsdp" else 0
        known = self.prices.setdefault((*shares(s), s.config.train.micro_batch, fsdp), {})
        missing = [kind for kind in cut.kinds if kind not in known]
        if missing:
            pace = Pace(s, self.gpu)
            known.update((kind, price_of(pace, kind)) for kind in missing)
        return known

    def held(self, s: Setting, cut: Cut) -> Mapping[Kind, Held]:
        known = self.holdings.setdefault((*shares(s), s.config.pipeline.pair), {})
        known.update((kind, held_of(s, kind)) for kind in cut.kinds if kind not in known)
        return known

    def legal(self, config: Config) -> bool:
        case = Case(config, self.world)
        for rule in RULES:
            if not rule.holds(case):
                self.refusals.add(rule.name, rule.says(case))
                return False
        tokens = config.train.micro_batch * config.data.seq_len / (config.parallel.tp * config.parallel.cp)
        if tokens < FEWEST_TOKENS:
            self.refusals.add("tokens of a rank", f"{tokens:g} tokens a rank and microbatch; expected {FEWEST_TOKENS}")
            return False
        return True

    def candidates(self, base: Config) -> Iterator[Candidate]:
        for grid in combinations(base, self.world, self.gpu, self.fixed):
            for config in variants(grid, self.fixed):
                self.looked += 1
                if self.legal(config) and (found := self.fitting(config)):
                    yield found

    def fitting(self, config: Config, rung: int = 0) -> Candidate | None:
        """The layout with as little recomputed as fits, from this rung on."""
        cut = self.cut(config)

        def need(rung: int) -> float:
            s = plain_setting(config, self.world, self.ladder[rung])
            return largest_gib(s, cut, self.held(s, cut))

        least = need(len(self.ladder) - 1)
        if least > self.gpu.memory:
            what = f"{described(config)} needs {least:.0f} GiB with all recomputed, the card has {self.gpu.memory:.0f}"
            self.refusals.add("memory", what)
            return None
        while need(rung) > self.gpu.memory:
            rung += 1
        s = plain_setting(config, self.world, self.ladder[rung])
        seconds = step_seconds(s, self.cluster, cut, self.priced(s, cut), self.held(s, cut))
        return Candidate(config, s.choices, s, seconds, need(rung), rung)

    def exact(self, candidate: Candidate) -> tuple[Setting, list[RankMemory]] | None:
        """The layout walked: its memory, if that fits as well."""
        setting = setting_of(candidate.config, self.world, candidate.choices)
        memory = memory_in(setting)
        fullest = worst(memory)
        if fullest.total + fullest.outside <= self.gpu.memory * GIB:
            return setting, memory
        what = f"{described(candidate.config)} needs {fullest.total / GIB:.0f} GiB on rank {fullest.rank}"
        self.refusals.add("memory", what)
        return None


def shares(s: Setting) -> tuple[object, ...]:
    """What a rank's share of a layer depends on, beside the sequences of a microbatch."""
    p = s.config.parallel
    return p.tp, p.cp, p.ep, p.etp, s.choices.recompute


def described(config: Config) -> str:
    p, c = config.parallel, config.pipeline
    degrees = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "vpp": c.vpp, "ep": p.ep, "etp": p.etp}
    said = [f"{name} {n}" for name, n in degrees.items() if n > 1 or name in ("tp", "pp", "ep")]
    return ", ".join([*said, f"mbs {config.train.micro_batch}", *(["overlap"] if c.pair else [])])


def search(
    base: Config, world: int, choices: Choices, gpu: Gpu, fixed: frozenset[str] = frozenset(), best: int = 10
) -> Found:
    """The best layouts; keys in `fixed` stay as they are in `base`. What fits by the closed form alone is tried again
    with more recomputed, in its new place among the others."""
    looking = Search(world, gpu, choices, fixed)
    candidates = sorted(looking.candidates(base), key=lambda each: each.seconds)
    waiting = [(each.seconds, at, each) for at, each in enumerate(candidates)]  # sorted, so a heap
    ranked: list[Ranked] = []
    while waiting and len(ranked) < max(best, CLOCKED):
        _, at, each = heapq.heappop(waiting)
        if found := looking.exact(each):
            setting, memory = found
            ranked.append(Ranked(each.config, each.choices, time_step(setting, gpu), memory))
        elif each.rung + 1 < len(looking.ladder) and (more := looking.fitting(each.config, each.rung + 1)):
            heapq.heappush(waiting, (more.seconds, at, more))
    ranked.sort(key=lambda each: each.time.seconds)
    return Found(ranked[:best], front_of(candidates, base, world), looking.refusals, looking.looked)


def front_of(candidates: list[Candidate], base: Config, world: int) -> list[tuple[float, float, Candidate]]:
    """Of layouts from the fastest on, those that need less memory than all faster ones."""
    front: list[tuple[float, float, Candidate]] = []
    tokens = base.train.global_batch * base.data.seq_len / world
    for each in candidates:
        if not front or each.gib < front[-1][0]:
            front.append((each.gib, tokens / each.seconds, each))
    return front
