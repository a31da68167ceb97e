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
from moefold.plan.memory.live_microbatches import StageBytes
from moefold.plan.memory.rank_stages import RankKind, RankStages, StageCount, count_stage, stages_by_rank
from moefold.plan.memory.resident import STATE_ELEMENT_BYTES, ResidentState, resident_state
from moefold.plan.memory.run_setting import GIB, RunSetting, build_run_setting
from moefold.plan.options import PlanChoices

CUBLAS_WORKSPACE = GIB / 16  # of cuBLAS, which torch allocates
OP_DESCRIPTIONS = {"F": "forward", "D": "backward", "W": "weight gradients"}


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


def plan_memory(
    config: Config, world: int, choices: PlanChoices | None = None, ranks: Iterable[int] | None = None
) -> list[RankMemory]:
    """Every pipeline rank's memory, or that of the ranks asked for; `worst` picks the one that decides."""
    return memory_by_rank(build_run_setting(config, world, choices or PlanChoices()), ranks)


def memory_by_rank(s: RunSetting, ranks: Iterable[int] | None = None) -> list[RankMemory]:
    every = stages_by_rank(s.config)
    kinds: dict[RankKind, RankKindCosts] = {}  # most ranks of a pipeline are of a few kinds
    found: list[RankMemory] = []
    for number in range(len(every)) if ranks is None else ranks:
        kind = every[number].kind
        if kind not in kinds:
            kinds[kind] = rank_kind_costs(s, every[number])
        found.append(rank_memory(s, number, every[number], kinds[kind]))
    return found


def fullest_rank(ranks: list[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


@dataclass(frozen=True)
class RankKindCosts:
    """What ranks with the same pieces have in common: stages as they are on average, and with the fullest experts."""

    state: ResidentState
    update: float
    buffers: float
    stages: list[StageCount]
    fullest: list[StageCount]
    even: StageBytes
    full: StageBytes


def rank_kind_costs(s: RunSetting, rank: RankStages) -> RankKindCosts:
    even = [count_stage(s.config.model, pieces, s.portion, s.choices) for pieces in rank.pieces]
    full = [count_stage(s.config.model, pieces, s.portion, s.choices, s.load) for pieces in rank.pieces]
    state = resident_state(s, rank, even)
    return RankKindCosts(
        state,
        optimizer_workspace(s, state),
        buffer_bytes(s, rank, state),
        even,
        full,
        bytes_by_stage(even),
        bytes_by_stage(full),
    )


def bytes_by_stage(stages: list[StageCount]) -> StageBytes:
    passes = [*(stage.forward for stage in stages), *(stage.backward for stage in stages), *(0.0 for _ in stages)]
    kept, waiting = ([getattr(stage, name) for stage in stages] for name in ("kept", "waiting"))
    return StageBytes(kept, waiting, passes)


class PeakMoment(NamedTuple):
    """A rank's worst moment: what is kept then and needed beside, with experts evenly loaded and at their fullest;
    gradients that are there; live microbatches, and what runs."""

    even: float
    full: float
    working: float
    gradients: float
    live: tuple[int, ...]
    running_op: str


def find_peak_moment(s: RunSetting, number: int, rank: RankStages, p: RankKindCosts) -> PeakMoment:
    moments, gradients = s.moments[number], p.state.gradients
    at = moments.peak(p.full)
    (kept, working), most = moments.holds(at, p.even), sum(moments.holds(at, p.full))
    kind, chunk, live = moments.says(at)
    found = PeakMoment(
        kept, most - working, working, gradients, live, f"{OP_DESCRIPTIONS[kind]} of stage {rank.numbers[chunk]}"
    )
    if s.grows:
        found = max(one_microbatch_moments(s, p), key=lambda each: each.full + each.working + each.gradients)
    if p.update + gradients > found.full + found.working + found.gradients:
        return PeakMoment(0.0, 0.0, p.update, gradients, (0,) * len(live), "optimizer step")
    return found


def one_microbatch_moments(s: RunSetting, p: RankKindCosts) -> Iterator[PeakMoment]:
    """The moments of a step's only microbatch: forward, when no gradient is there, and every step of the way back."""
    each = STATE_ELEMENT_BYTES[s.config.optim.gradients]
    even, full = p.stages[0], p.fullest[0]
    yield PeakMoment(even.kept, full.kept + full.forward - even.forward, even.forward, 0.0, (1,), "forward of stage 0")
    for (later, done, needs), (less, _, more) in zip(even.backward_steps, full.backward_steps, strict=True):
        yield PeakMoment(
            even.kept - later, full.kept - less + more - needs, needs, done * each, (1,), "backward of stage 0"
        )


def rank_memory(s: RunSetting, number: int, rank: RankStages, p: RankKindCosts) -> RankMemory:
    state, at = p.state, find_peak_moment(s, number, rank, p)
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
        graph_input_bytes(s, rank, at.live),
        on_host + sum(n * stage.offloaded for n, stage in zip(at.live, p.stages, strict=True)),
        s.outside,
        at.live,
        at.running_op,
    )


def optimizer_workspace(s: RunSetting, held: ResidentState) -> float:
    """What the optimizer's one pass needs beside: the sums over ranks that came."""
    return held.summed * STATE_ELEMENT_BYTES[s.config.optim.gradients] if s.choices.stack == "moefold" else 0.0


def buffer_bytes(s: RunSetting, rank: RankStages, held: ResidentState) -> float:
    """What travels between pipeline ranks, two messages ahead and one sent each way; the angles of positions; products'
    workspace; and with FSDP two layers' weights and one's gradients, whole."""
    m, c, wide = s.config.model, s.choices, s.choices.recipe.wide
    found = CUBLAS_WORKSPACE if c.device == "cuda" else 0.0
    if s.config.parallel.pp > 1:
        found += 4 * s.portion.tokens * m.hidden * wide * (1 + rank.aside)
    layers = sum(piece in "tm" for pieces in rank.pieces for piece, _ in pieces)
    if c.stack == "moefold":
        found += layers * s.portion.seq_len * (m.attention.rope_dim or m.attention.head_dim) * 4
    if c.sharding == "fsdp":
        found += held.parameters / max(1, layers) * (2 * wide + STATE_ELEMENT_BYTES[s.config.optim.gradients])
    return found


def graph_input_bytes(s: RunSetting, rank: RankStages, live: tuple[int, ...]) -> float:
    """Inputs of captured steps lie in places of their own: one stream for each layer and microbatch under way."""
    if s.choices.graphs == "none":
        return 0.0
    layers = [sum(piece in "tm" for piece, _ in pieces) for pieces in rank.pieces]
    captured = sum(n * count for n, count in zip(live, layers, strict=True))
    return captured * s.portion.tokens * s.config.model.hidden * s.choices.recipe.wide
