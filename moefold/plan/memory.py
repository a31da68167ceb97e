"""How much memory every pipeline rank needs at its worst moment, and why. Torch-free; a search asks it often.

    weights + gradients + main weights + moments        what a rank holds all the time
    + activations + working + margin                    what it holds at its worst moment
    + buffers + graphs                                  what communication and captured graphs keep aside

Activations are those of the microbatches that the rank's own program has under way then, stage by stage. Ranks that
differ in their tensor, context, data or expert coordinate hold the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod, sqrt
from statistics import NormalDist

from moefold.anatomy.steps import is_moe
from moefold.config.run import Config
from moefold.dispatch.price import choose
from moefold.kernels.catalog import Facts, pick
from moefold.layout.placement import GRIDS
from moefold.plan.choices import Choices
from moefold.plan.counts import Class, piece_count
from moefold.plan.live import Load, Moments, moments_of
from moefold.plan.sizes import Portion, portion_of
from moefold.plan.stage import RankKind, RankStages, StageCount, stage_count, stages_by_rank

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2}
WORKSPACE = 64 * 2**20  # of cuBLAS, which torch allocates
CONTEXT = 0.6 * GIB  # of CUDA itself, and its kernels
GROUP = 0.15 * GIB  # of NCCL, for each axis that talks
DOES = {"F": "forward", "D": "backward", "W": "weight gradients"}
BUCKET = 1 << 25  # parameters, as shard/buckets.py fills them; a test compares


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank at its worst moment, in bytes. `live`: microbatches under way by stage; `at`: what runs then.
    `host` lies in host memory, `outside` on the card but out of torch's sight; the total has neither."""

    rank: int
    stages: tuple[int, ...]
    parameters: float
    weights: float
    gradients: float
    main: float
    moments: float
    activations: float
    working: float
    margin: float
    buffers: float
    graphs: float
    host: float
    outside: float
    live: tuple[int, ...]
    at: str

    @property
    def state(self) -> float:
        """What is held all the time."""
        return self.weights + self.gradients + self.main + self.moments

    @property
    def total(self) -> float:
        return self.state + self.activations + self.working + self.margin + self.buffers + self.graphs


@dataclass(frozen=True)
class Setting:
    """A run on so many ranks under these choices, and what follows from it."""

    config: Config
    world: int
    choices: Choices
    portion: Portion
    moments: list[Moments]
    microbatches: int

    @cached_property
    def degrees(self) -> dict[str, int]:
        p = self.config.parallel
        dense, expert = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
        return {**self.portion.degrees, "dp": max(1, self.world // dense), "edp": max(1, self.world // expert)}

    @cached_property
    def outside(self) -> float:
        """On the card, but out of torch's sight."""
        return CONTEXT + GROUP * sum(size > 1 for size in (*self.degrees.values(), self.config.parallel.pp))

    @cached_property
    def load(self) -> float:
        """Rows of a rank's experts at the quantile, over their even share: experts differ by `spread`, of which a rank
        averages over those it holds, and chance does the rest. A rank that holds all experts has neither."""
        p, moe, c = self.portion, self.config.model.moe, self.choices
        if p.ep == 1 or c.spread == 0:
            return 1.0
        variance = c.spread**2 * p.ep / moe.experts + 1 / max(1.0, p.tokens * moe.top_k)
        return round(max(1.0, 1 + deviations(c.quantile) * sqrt((1 - 1 / p.ep) * variance)), 4)


@lru_cache(maxsize=64)
def deviations(quantile: float) -> float:
    """How many standard deviations above the mean this quantile of a normal distribution lies."""
    return NormalDist().inv_cdf(quantile)


def microbatches_of(config: Config, world: int) -> int:
    """How many pass one pipeline in a step."""
    p, train = config.parallel, config.train
    dp = max(1, world // (p.tp * p.cp * p.pp))
    return max(1, train.global_batch // (dp * train.micro_batch))


def setting_of(config: Config, world: int, choices: Choices) -> Setting:
    c = config.pipeline
    microbatches = microbatches_of(config, world)
    moments = moments_of(c.schedule, config.parallel.pp, c.vpp, microbatches, c.pair, c.defer)
    dispatcher, _ = choose(config, choices.node, int(choices.recipe.wide))
    apart = (c.pair and c.fill) or any(each.apart for each in moments)
    return Setting(config, world, choices, portion_of(config, dispatcher, apart), moments, microbatches)


def memory_of(
    config: Config, world: int, choices: Choices | None = None, ranks: Iterable[int] | None = None
) -> list[RankMemory]:
    """Every pipeline rank's memory, or that of the ranks asked for; `worst` picks the one that decides."""
    return memory_in(setting_of(config, world, choices or Choices()), ranks)


def memory_in(s: Setting, ranks: Iterable[int] | None = None) -> list[RankMemory]:
    every = stages_by_rank(s.config)
    kinds: dict[RankKind, Prepared] = {}  # most ranks of a pipeline are of a few kinds
    found: list[RankMemory] = []
    for number in range(len(every)) if ranks is None else ranks:
        kind = every[number].kind
        if kind not in kinds:
            kinds[kind] = prepared(s, every[number])
        found.append(rank_memory(s, number, every[number], kinds[kind]))
    return found


def worst(ranks: list[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


@dataclass(frozen=True)
class Prepared:
    """What ranks with the same pieces have in common: stages as they are on average, and with the fullest experts."""

    state: State
    update: float
    buffers: float
    even: Load
    full: Load
    offloaded: list[float]


def prepared(s: Setting, rank: RankStages) -> Prepared:
    even = [stage_count(s.config.model, pieces, s.portion, s.choices) for pieces in rank.pieces]
    full = [stage_count(s.config.model, pieces, s.portion, s.choices, s.load) for pieces in rank.pieces]
    state = state_of(s, rank, even)
    offloaded = [stage.offloaded for stage in even]
    return Prepared(state, update_of(s, state), buffers_of(s, rank, state), load_of(even), load_of(full), offloaded)


def load_of(stages: list[StageCount]) -> Load:
    passes = [*(stage.forward for stage in stages), *(stage.backward for stage in stages), *(0.0 for _ in stages)]
    kept, waiting = ([getattr(stage, name) for stage in stages] for name in ("kept", "waiting"))
    return Load(kept, waiting, passes)


def rank_memory(s: Setting, number: int, rank: RankStages, p: Prepared) -> RankMemory:
    moments, state = s.moments[number], p.state
    at = moments.peak(p.full)
    most, needed = moments.holds(at, p.full)
    activations, working = moments.holds(at, p.even) if p.full is not p.even else (most, needed)
    kind, chunk, live = moments.says(at)
    does = f"{DOES[kind]} of stage {rank.numbers[chunk]}"
    if p.update > most + needed:
        live, activations, working, does = (0,) * len(live), 0.0, p.update, "optimizer step"
        most, needed = activations, working
    on_host = state.main + state.moments if s.choices.states_on_host else 0.0
    return RankMemory(
        number,
        rank.numbers,
        state.parameters,
        state.weights,
        state.gradients,
        0.0 if on_host else state.main,
        0.0 if on_host else state.moments,
        activations,
        working,
        most + needed - activations - working,
        p.buffers,
        graphs_of(s, rank, live),
        on_host + sum(n * size for n, size in zip(live, p.offloaded, strict=True)),
        s.outside,
        live,
        does,
    )


@dataclass(frozen=True)
class State:
    """What a rank holds all the time: its parameters, how many of them are its share among replicas, how many of these
    have other ranks' gradients to add, and bytes."""

    parameters: float
    share: float
    summed: float
    weights: float
    gradients: float
    main: float
    moments: float


def state_of(s: Setting, rank: RankStages, stages: list[StageCount]) -> State:
    """Weights, gradients, main weights and moments; what is cut over replicas is their share. Weights of a low
    precision have the copies that products read."""
    choices, recipe = s.choices, s.choices.recipe
    counts = {kind: (count, replicas(s, kind)) for kind, count in parameters_of(s, rank, stages).items()}
    whole = sum(count for count, _ in counts.values())
    share = sum(count / n for count, n in counts.values())
    weights, states = {"none": (whole, whole), "zero": (whole, share), "fsdp": (share, share)}[choices.sharding]
    quantized = sum(stage.quantized for stage in stages) * weights / whole if recipe.copies else 0.0
    plain = weights - (quantized if choices.quantized_weights else 0.0)
    return State(
        whole,
        share,
        sum(count / n for count, n in counts.values() if n > 1),
        plain * recipe.wide + quantized * recipe.copies,
        weights * BYTES[choices.gradients],
        states * 4 if recipe.wide < 4 else 0.0,
        states * 2 * BYTES[s.config.optim.moments],
    )


def parameters_of(s: Setting, rank: RankStages, stages: list[StageCount]) -> Counter[Class]:
    found: Counter[Class] = Counter()
    for stage in stages:
        found.update(dict(stage.parameters))
    if rank.copies:
        found.update(piece_count(s.config.model, "E", 0, s.portion, s.choices).parameters)
    return found


def replicas(s: Setting, kind: Class) -> int:
    """How many ranks hold the same parameters of a class: those along the axes of their grid that do not cut them."""
    grid, axes = kind
    return prod(s.degrees[axis] for axis in GRIDS[grid] if axis not in axes)


def update_of(s: Setting, held: State) -> float:
    """What the optimizer's step needs beside: summed gradients that came, and a bucket's weights being rounded; without
    a fused kernel the moments of a bucket in fp32 too."""
    m = s.config.model
    layer = m.moe.experts * 2 * m.moe.ffn * (m.moe.latent or m.hidden) / (s.portion.ep * s.portion.etp)
    largest = max(BUCKET, m.vocab * m.hidden / s.portion.tp, layer if is_moe(m, m.layers - 1) else 0.0)
    bucket = min(largest, held.share)
    facts = Facts(s.choices.device, "bf16", moments=s.config.optim.moments, triton=s.choices.device == "cuda")
    fused = s.choices.stack == "megatron" or pick("adamw", facts)[0] != "reference"
    came = held.summed * BYTES[s.choices.gradients] if s.choices.stack == "moefold" else 0.0
    return came + bucket * (s.choices.recipe.wide + (0 if fused else 16))


def buffers_of(s: Setting, rank: RankStages, held: State) -> float:
    """What travels between pipeline ranks, two messages ahead and one sent each way; the angles of positions; products'
    workspace; and with FSDP two layers' weights and one's gradients, whole."""
    m, c, wide = s.config.model, s.choices, s.choices.recipe.wide
    found = WORKSPACE if c.device == "cuda" else 0.0
    if s.config.parallel.pp > 1:
        found += 4 * s.portion.tokens * m.hidden * wide * (1 + rank.aside)
    layers = sum(piece in "tm" for pieces in rank.pieces for piece, _ in pieces)
    if c.stack == "moefold":
        found += layers * s.portion.seq_len * (m.attention.rope_dim or m.attention.head_dim) * 4
    if c.sharding == "fsdp":
        found += held.parameters / max(1, layers) * (2 * wide + BYTES[c.gradients])
    return found


def graphs_of(s: Setting, rank: RankStages, live: tuple[int, ...]) -> float:
    """Inputs of captured steps lie in places of their own: one stream for each layer and microbatch under way."""
    if s.choices.graphs == "none":
        return 0.0
    layers = [sum(piece in "tm" for piece, _ in pieces) for pieces in rank.pieces]
    captured = sum(n * count for n, count in zip(live, layers, strict=True))
    return captured * s.portion.tokens * s.config.model.hidden * s.choices.recipe.wide
