"""Which pieces of a model each pipeline stage holds, and in which order its ranks run them. Torch-free.

The layout is the user's string, or the cut whose slowest stage is fastest, by the FLOPs of each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moefold.anatomy.steps import StepSpec, block_steps, look_ahead, predict
from moefold.config.run import Config, ModelConfig
from moefold.schedule.balance import propose
from moefold.schedule.catalog import SCHEDULES, program_of
from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import Program
from moefold.schedule.stages import Layout, parse


@dataclass(frozen=True)
class Stage:
    """What one stage holds: layers by their number in the model, layers of multi-token prediction by their depth (the
    first is 1), and whether it begins or ends the model. `aside` streams were set aside before it."""

    number: int
    embeds: bool
    layers: range
    ahead: range
    predicts: bool
    aside: int

    @property
    def norms(self) -> bool:
        """Whether the model's last norm is used here: by the head, or by the first layer that looks ahead."""
        return self.predicts or 1 in self.ahead

    @property
    def looks_up(self) -> bool:
        """Whether it needs the embedding to look up tokens."""
        return self.embeds or len(self.ahead) > 0


def whole(model: ModelConfig) -> Stage:
    """All of the model as one stage."""
    return Stage(0, True, range(model.layers), range(1, model.mtp + 1), True, 0)


def pieces_of(model: ModelConfig) -> str:
    """Layers are called dense only where they come first, as in a layout a user writes."""
    dense = min(model.moe.dense_layers, model.layers)
    return f"E{'d' * dense}{'t' * (model.layers - dense)}{'m' * model.mtp}L"


def flops(steps: Sequence[StepSpec], seq_len: int) -> float:
    return sum(step.flops(seq_len) for step in steps)


def piece_costs(model: ModelConfig, seq_len: int) -> list[float]:
    """FLOPs of each piece. Looking up tokens costs bytes instead, taken as little as a layer's hundredth."""
    layers = [flops(block_steps(model, layer), seq_len) for layer in range(model.layers)]
    ahead = [
        flops([look_ahead(model), *block_steps(model, model.layers + depth)], seq_len) for depth in range(model.mtp)
    ]
    return [min(layers) / 100, *layers, *ahead, predict(model).flops(seq_len)]


def layout_of(config: Config) -> Layout:
    """The user's layout, or a proposed one."""
    model, count = config.model, config.parallel.pp * config.pipeline.vpp
    if config.pipeline.layout:
        return parse(config.pipeline.layout)
    return proposed(model, config.data.seq_len, count)


@lru_cache(maxsize=1024)
def proposed(model: ModelConfig, seq_len: int, count: int) -> Layout:
    """Kept, since a search asks for the same cut many times."""
    return propose(pieces_of(model), piece_costs(model, seq_len), count)


def stages_of(config: Config) -> list[Stage]:
    """Every stage of the run, in order."""
    layout = layout_of(config)
    found: list[Stage] = []
    for number, pieces in enumerate(layout.stages):
        depths = layout.mtp_layers(number)
        ahead = range(depths.start + 1, depths.stop + 1)
        aside = depths.start + 1 if depths.start else 0  # with the model's own stream
        found.append(Stage(number, "E" in pieces, layout.layers(number), ahead, "L" in pieces, aside))
    return found


def rank_of_stage(config: Config) -> list[int]:
    """Which pipeline rank holds each stage."""
    p, schedule = config.parallel.pp, SCHEDULES[config.pipeline.schedule]
    return [schedule.rank_of(stage, p) for stage in range(p * config.pipeline.vpp)]


def embedding_ranks(config: Config) -> list[int]:
    """The pipeline ranks that hold a copy of the embedding: its gradient is the sum over them."""
    ranks = rank_of_stage(config)
    needs = [s.looks_up or (s.predicts and config.model.tied_head) for s in stages_of(config)]
    return sorted({rank for rank, need in zip(ranks, needs, strict=True) if need})


def norm_ranks(config: Config) -> list[int]:
    """The pipeline ranks that hold a copy of the last norm."""
    ranks = rank_of_stage(config)
    return sorted({rank for rank, stage in zip(ranks, stages_of(config), strict=True) if stage.norms})


def program_for(config: Config, microbatches: int) -> Program:
    """What every pipeline rank does in one step."""
    c = config.pipeline
    program = program_of(c.schedule, config.parallel.pp, c.vpp, microbatches)
    if c.pair:
        program = pair_forward_with_backward(program)
    return defer_weight_grads(program) if c.defer else program


def splits_weights(config: Config) -> bool:
    """Whether some weight gradient is computed apart from its data gradient."""
    if config.pipeline.pair and config.pipeline.fill:
        return True
    slots = [slot for slots in program_for(config, 2 * config.parallel.pp) for slot in slots]
    return any([op.kind for op in slot] == ["W"] for slot in slots)
