"""How much memory every pipeline rank needs at its peak, and why. Torch-free, and quick enough to be asked by a search.

    weights + gradients + main weights + moments        what a rank holds all the time
    + activations + working set + margin                what it holds at its worst moment
    + buffers + graphs                                  what communication and captured graphs keep aside

Activations are those of the microbatches that the rank's own program has under way then, stage by stage.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from statistics import NormalDist

from moefold.anatomy.stages import Stage, rank_of_stage, stages_of
from moefold.config.run import Config, ModelConfig
from moefold.dispatch.price import choose
from moefold.layout.placement import GRIDS
from moefold.plan.choices import Choices
from moefold.plan.counts import Class, alike, piece_count
from moefold.plan.live import State, states_of
from moefold.plan.sizes import Portion, portion_of

GIB = 2**30
CONTEXT = 0.6 * GIB  # what CUDA itself takes on a card, and 0.1 for each group that talks: outside of torch's sight
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank at its peak, in bytes. `live` are microbatches under way by stage, `at` says what runs then.
    `host` lies in host memory, `outside` on the card but out of torch's sight; neither is in the total."""

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
    """All that a rank's memory depends on, with what follows from it."""

    config: Config
    world: int
    choices: Choices
    portion: Portion

    @property
    def degrees(self) -> dict[str, int]:
        p = self.config.parallel
        dense, expert = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
        return {**self.portion.degrees, "dp": max(1, self.world // dense), "edp": max(1, self.world // expert)}

    @property
    def microbatches(self) -> int:
        train = self.config.train
        return max(1, train.global_batch // (self.degrees["dp"] * train.micro_batch))


def setting_of(config: Config, world: int, choices: Choices) -> Setting:
    dispatcher, _ = choose(config, choices.node, int(choices.recipe.wide))
    return Setting(config, world, choices, portion_of(config, dispatcher, splits(config)))


def splits(config: Config) -> bool:
    c = config.pipeline
    return c.defer or c.pair or c.schedule.startswith(("zb", "dualpipe"))


@dataclass(frozen=True)
class StageCount:
    """A stage of pieces: what a microbatch keeps until D and until W, and needs for the moment beside."""

    parameters: tuple[tuple[Class, float], ...]
    quantized: float
    kept: float
    remade: float
    waiting: float
    forward: float
    backward: float


Pieces = tuple[tuple[str, int], ...]


def pieces_of(model: ModelConfig, stage: Stage) -> Pieces:
    """A stage's pieces, layers by the first that is alike."""
    same = alike(model)
    layers = [("t", same[layer]) for layer in stage.layers]
    ahead = [("m", same[model.layers + depth - 1]) for depth in stage.ahead]
    return (
        *([("E", 0)] if stage.embeds else []),
        *layers,
        *ahead,
        *([("L", 0)] if stage.predicts else []),
    )


@lru_cache(maxsize=65_536)
def stage_count(
    model: ModelConfig, pieces: Pieces, portion: Portion, choices: Choices, load: float = 1.0
) -> StageCount:
    counts = [piece_count(model, piece, layer, portion, choices, load) for piece, layer in pieces]
    parameters: Counter[Class] = Counter()
    for piece in counts:
        parameters.update(piece.parameters)
    behind = forward = backward = 0.0  # what later pieces keep is not there yet, or gone
    for piece in reversed(counts):
        for step in reversed(piece.steps):
            forward = max(forward, step.working[0] - behind)
            backward = max(backward, step.working[1] + piece.remade - behind)
            behind += step.kept
    return StageCount(
        tuple(parameters.items()),
        sum(step.quantized for piece in counts for step in piece.steps),
        sum(piece.kept for piece in counts),
        sum(piece.remade for piece in counts),
        sum(step.waiting for piece in counts for step in piece.steps),
        forward,
        backward,
    )


def memory_of(config: Config, world: int, choices: Choices | None = None) -> list[RankMemory]:
    """Every pipeline rank's memory, in the order of ranks; `worst` picks the one that decides."""
    s = setting_of(config, world, choices or Choices())
    stages, homes = stages_of(config), rank_of_stage(config)
    c = config.pipeline
    states = states_of(c.schedule, config.parallel.pp, c.vpp, s.microbatches, c.pair, c.defer)
    return [
        rank_memory(s, rank, [stages[at] for at, home in enumerate(homes) if home == rank], states[rank])
        for rank in range(config.parallel.pp)
    ]


def worst(ranks: list[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


def rank_memory(s: Setting, rank: int, stages: list[Stage], states: list[State]) -> RankMemory:
    model, choices = s.config.model, s.choices
    counts = [stage_count(model, pieces_of(model, stage), s.portion, choices) for stage in stages]
    fullest = load(s)
    full = [stage_count(model, pieces_of(model, stage), s.portion, choices, fullest) for stage in stages]

    def bytes_in(state: State, of: list[StageCount]) -> tuple[float, float]:
        held = sum(n * c.kept for n, c in zip(state.live, of, strict=True))
        held += sum(n * c.waiting for n, c in zip(state.waiting, of, strict=True))
        running = of[state.chunk]
        return held, {"F": running.forward, "D": running.backward, "W": 0.0}[state.kind]

    peak = max(states, key=lambda state: sum(bytes_in(state, full)))
    activations, working = bytes_in(peak, counts)
    state = state_bytes(s, stages, counts)
    on_host = state["main"] + state["moments"] if choices.states_on_host else 0.0
    stored = {**state, "main": 0.0, "moments": 0.0} if on_host else state
    live_total = sum(peak.live)
    return RankMemory(
        rank,
        tuple(stage.number for stage in stages),
        **stored,
        activations=activations,
        working=working,
        margin=sum(bytes_in(peak, full)) - activations - working,
        buffers=buffers(s, stages, state),
        graphs=graph_pools(s, stages, live_total),
        host=on_host + sum(n * c.remade for n, c in zip(peak.live, counts, strict=True) if choices.offload),
        outside=CONTEXT,
        live=peak.live,
        at=f"{peak.kind} of stage {stages[peak.chunk].number}",
    )


def state_bytes(s: Setting, stages: list[Stage], counts: list[StageCount]) -> dict[str, float]:
    """Weights, gradients, main weights and moments. What is cut over replicas is their share."""
    model, choices, degrees = s.config.model, s.choices, s.degrees
    parameters: Counter[Class] = Counter()
    for count in counts:
        parameters.update(dict(count.parameters))
    looks_up = any(stage.looks_up or (stage.predicts and model.tied_head) for stage in stages)
    if looks_up and not any(stage.embeds for stage in stages):
        parameters.update(piece_count(model, "E", 0, s.portion, choices).parameters)
    whole = sum(parameters.values())
    shared = sum(
        n / prod(degrees[axis] for axis in GRIDS[grid] if axis not in axes) for (grid, axes), n in parameters.items()
    )
    cut = {"none": (whole, whole), "zero": (whole, shared), "fsdp": (shared, shared)}[choices.sharding]
    recipe, wide = choices.recipe, choices.recipe.wide
    quantized = sum(count.quantized for count in counts) * (cut[0] / whole)
    weights = cut[0] * wide + quantized * (recipe.copies - (wide if choices.quantized_weights else 0.0))
    moment = BYTES[s.config.optim.moments]
    return {
        "parameters": whole,
        "weights": weights if recipe.copies else cut[0] * wide,
        "gradients": cut[0] * BYTES[choices.gradients],
        "main": cut[1] * 4 if wide < 4 else 0.0,
        "moments": cut[1] * 2 * moment,
    }


@lru_cache(maxsize=64)
def deviations(quantile: float) -> float:
    """How many standard deviations above the mean this quantile of a normal distribution lies."""
    return NormalDist().inv_cdf(quantile)


def load(s: Setting) -> float:
    """Rows of a rank's experts at the quantile, over their even share: experts differ by `spread`, of which a rank
    averages over those it holds, and chance adds what it does to so many rows. One rank with all experts has no more."""
    p, moe, c = s.portion, s.config.model.moe, s.choices
    if p.ep == 1:
        return 1.0
    rows = max(1.0, p.tokens * moe.top_k)
    deviation = sqrt((1 - 1 / p.ep) * (c.spread**2 * p.ep / moe.experts + 1 / rows)) if c.spread else 0.0
    return round(max(1.0, 1 + deviations(c.quantile) * deviation), 4)


def buffers(s: Setting, stages: list[Stage], state: dict[str, float]) -> float:
    """What travels between pipeline ranks, summed gradients on their way, weights being handed out."""
    streams = 1 + max(stage.aside for stage in stages)
    cargo = s.portion.tokens * s.config.model.hidden * s.choices.recipe.wide * streams
    return 4 * cargo if s.config.parallel.pp > 1 else 0.0


def graph_pools(s: Setting, stages: list[Stage], live: int) -> float:
    """Inputs of captured steps lie in places of their own, for each layer and microbatch under way."""
    if s.choices.graphs == "none":
        return 0.0
    layers = max(len(stage.layers) + len(stage.ahead) for stage in stages)
    return live * layers * s.portion.tokens * s.config.model.hidden * s.choices.recipe.wide
