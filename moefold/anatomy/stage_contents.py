"""Which pieces of a model each pipeline stage holds, and in which order its ranks run them. Torch-free.

The layout is the user's string, or the cut whose slowest stage is fastest, by the FLOPs of each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moefold.anatomy.step_specs import StepSpec, block_step_specs, look_ahead_step, predict_step
from moefold.config.run import Config, ModelConfig
from moefold.schedule.balance_stages import propose_layout
from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import Program
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.stage_layout import StageLayout, parse_layout


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
    def uses_final_norm(self) -> bool:
        """Whether the model's last norm is used here: by the head, or by the first layer that looks ahead."""
        return self.predicts or 1 in self.ahead

    @property
    def uses_embedding(self) -> bool:
        """Whether it needs the embedding to look up tokens."""
        return self.embeds or len(self.ahead) > 0


def whole_model_stage(model: ModelConfig) -> Stage:
    """All of the model as one stage."""
    return Stage(0, True, range(model.layers), range(1, model.mtp + 1), True, 0)


def layout_letters(model: ModelConfig) -> str:
    """Layers are called dense only where they come first, as in a layout a user writes."""
    dense = min(model.moe.dense_layers, model.layers)
    return f"E{'d' * dense}{'t' * (model.layers - dense)}{'m' * model.mtp}L"


def summed_step_flops(steps: Sequence[StepSpec], seq_len: int) -> float:
    return sum(step.flops(seq_len) for step in steps)


def flops_of_each_piece(model: ModelConfig, seq_len: int) -> list[float]:
    """FLOPs of each piece. Looking up tokens costs bytes instead, taken as little as a layer's hundredth."""
    layers = [summed_step_flops(block_step_specs(model, layer), seq_len) for layer in range(model.layers)]
    ahead = [
        summed_step_flops([look_ahead_step(model), *block_step_specs(model, model.layers + depth)], seq_len)
        for depth in range(model.mtp)
    ]
    return [min(layers) / 100, *layers, *ahead, predict_step(model).flops(seq_len)]


def pipeline_layout(config: Config) -> StageLayout:
    """The user's layout, or a proposed one."""
    model, count = config.model, config.parallel.pp * config.pipeline.vpp
    if config.pipeline.layout:
        return parse_layout(config.pipeline.layout)
    return cached_layout_proposal(model, config.data.seq_len, count)


@lru_cache(maxsize=1024)
def cached_layout_proposal(model: ModelConfig, seq_len: int, count: int) -> StageLayout:
    """Kept, since a search asks for the same cut many times."""
    return propose_layout(layout_letters(model), flops_of_each_piece(model, seq_len), count)


def pipeline_stages(config: Config) -> list[Stage]:
    """Every stage of the run, in order."""
    layout = pipeline_layout(config)
    found: list[Stage] = []
    for number, pieces in enumerate(layout.stages):
        depths = layout.mtp_layers(number)
        ahead = range(depths.start + 1, depths.stop + 1)
        aside = depths.start + 1 if depths.start else 0  # with the model's own stream
        found.append(Stage(number, "E" in pieces, layout.layers(number), ahead, "L" in pieces, aside))
    return found


def rank_of_each_stage(config: Config) -> list[int]:
    """Which pipeline rank holds each stage."""
    p, schedule = config.parallel.pp, SCHEDULES[config.pipeline.schedule]
    return [schedule.rank_of(stage, p) for stage in range(p * config.pipeline.vpp)]


def embedding_ranks(config: Config) -> list[int]:
    """The pipeline ranks that hold a copy of the embedding: its gradient is the sum over them."""
    ranks = rank_of_each_stage(config)
    needs = [s.uses_embedding or (s.predicts and config.model.tied_head) for s in pipeline_stages(config)]
    return sorted({rank for rank, need in zip(ranks, needs, strict=True) if need})


def final_norm_ranks(config: Config) -> list[int]:
    """The pipeline ranks that hold a copy of the last norm."""
    ranks = rank_of_each_stage(config)
    return sorted({rank for rank, stage in zip(ranks, pipeline_stages(config), strict=True) if stage.uses_final_norm})


def pipeline_program(config: Config, microbatches: int) -> Program:
    """What every pipeline rank does in one step."""
    c = config.pipeline
    program = build_program(c.schedule, config.parallel.pp, c.vpp, microbatches)
    if c.pair:
        program = pair_forward_with_backward(program)
    return defer_weight_grads(program) if c.defer else program


def separates_weight_grads(config: Config) -> bool:
    """Whether some weight gradient is computed apart from its data gradient."""
    if config.pipeline.pair and config.pipeline.fill:
        return True
    slots = [slot for slots in pipeline_program(config, 2 * config.parallel.pp) for slot in slots]
    return any([op.kind for op in slot] == ["W"] for slot in slots)
