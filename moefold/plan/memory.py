"""How much memory every pipeline rank needs at its worst moment, and why. Torch-free; a search asks it often.

    weights + gradients + main weights + moments        what a rank holds all the time
    + activations + working + margin                    what it holds at its worst moment
    + buffers + graphs                                  what communication and captured graphs keep aside

Activations are those of the microbatches that the rank's own program has under way then, stage by stage. Ranks that
differ in their tensor, context, data or expert coordinate hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moefold.config.run import Config
from moefold.plan.choices import Choices
from moefold.plan.live import Load
from moefold.plan.setting import GIB, Setting, setting_of
from moefold.plan.stage import RankKind, RankStages, StageCount, stage_count, stages_by_rank
from moefold.plan.state import BYTES, State, state_of

WORKSPACE = GIB / 16  # of cuBLAS, which torch allocates
DOES = {"F": "forward", "D": "backward", "W": "weight gradients"}


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
    stages: list[StageCount]
    fullest: list[StageCount]
    even: Load
    full: Load


def prepared(s: Setting, rank: RankStages) -> Prepared:
    even = [stage_count(s.config.model, pieces, s.portion, s.choices) for pieces in rank.pieces]
    full = [stage_count(s.config.model, pieces, s.portion, s.choices, s.load) for pieces in rank.pieces]
    state = state_of(s, rank, even)
    return Prepared(state, update_of(s, state), buffers_of(s, rank, state), even, full, load_of(even), load_of(full))


def load_of(stages: list[StageCount]) -> Load:
    passes = [*(stage.forward for stage in stages), *(stage.backward for stage in stages), *(0.0 for _ in stages)]
    kept, waiting = ([getattr(stage, name) for stage in stages] for name in ("kept", "waiting"))
    return Load(kept, waiting, passes)


class Worst(NamedTuple):
    """A rank's worst moment: what is kept then and needed beside, with experts evenly loaded and at their fullest;
    gradients that are there; live microbatches, and what runs."""

    even: float
    full: float
    working: float
    gradients: float
    live: tuple[int, ...]
    does: str


def worst_moment(s: Setting, number: int, rank: RankStages, p: Prepared) -> Worst:
    moments, gradients = s.moments[number], p.state.gradients
    at = moments.peak(p.full)
    (kept, working), most = moments.holds(at, p.even), sum(moments.holds(at, p.full))
    kind, chunk, live = moments.says(at)
    found = Worst(kept, most - working, working, gradients, live, f"{DOES[kind]} of stage {rank.numbers[chunk]}")
    if s.grows:
        found = max(growing(s, p), key=lambda each: each.full + each.working + each.gradients)
    if p.update + gradients > found.full + found.working + found.gradients:
        return Worst(0.0, 0.0, p.update, gradients, (0,) * len(live), "optimizer step")
    return found


def growing(s: Setting, p: Prepared) -> Iterator[Worst]:
    """The moments of a step's only microbatch: forward, when no gradient is there, and every step of the way back."""
    each = BYTES[s.config.optim.gradients]
    even, full = p.stages[0], p.fullest[0]
    yield Worst(even.kept, full.kept + full.forward - even.forward, even.forward, 0.0, (1,), "forward of stage 0")
    for (later, done, needs), (less, _, more) in zip(even.way_back, full.way_back, strict=True):
        yield Worst(even.kept - later, full.kept - less + more - needs, needs, done * each, (1,), "backward of stage 0")


def rank_memory(s: Setting, number: int, rank: RankStages, p: Prepared) -> RankMemory:
    state, at = p.state, worst_moment(s, number, rank, p)
    on_host = state.main + state.moments if s.choices.states_on_host else 0.0
    return RankMemory(
        number,
        rank.numbers,
        state.parameters,
        state.weights,
        at.gradients,
        0.0 if on_host else state.main,
        0.0 if on_host else state.moments,
        at.even,
        at.working,
        at.full - at.even,
        p.buffers,
        graphs_of(s, rank, at.live),
        on_host + sum(n * stage.offloaded for n, stage in zip(at.live, p.stages, strict=True)),
        s.outside,
        at.live,
        at.does,
    )


def update_of(s: Setting, held: State) -> float:
    """What the optimizer's one pass needs beside: the sums over ranks that came."""
    return held.summed * BYTES[s.config.optim.gradients] if s.choices.stack == "moefold" else 0.0


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
        found += held.parameters / max(1, layers) * (2 * wide + BYTES[s.config.optim.gradients])
    return found


def graphs_of(s: Setting, rank: RankStages, live: tuple[int, ...]) -> float:
    """Inputs of captured steps lie in places of their own: one stream for each layer and microbatch under way."""
    if s.choices.graphs == "none":
        return 0.0
    layers = [sum(piece in "tm" for piece, _ in pieces) for pieces in rank.pieces]
    captured = sum(n * count for n, count in zip(live, layers, strict=True))
    return captured * s.portion.tokens * s.config.model.hidden * s.choices.recipe.wide
