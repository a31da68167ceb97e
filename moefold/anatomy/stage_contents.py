"""The contents of each pipeline stage, and the program of the pipeline's ranks. Torch-free.

The layout is the user's string, or the cut whose slowest stage is fastest, by the FLOPs of each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moefold.anatomy.step_specs import StepSpec, block_step_specs, look_ahead_step, predict_step
from moefold.config.run import Config, ModelConfig, PipelineConfig
from moefold.schedule.balance_stages import propose_layout
from moefold.schedule.passes import PairKind, apply_passes
from moefold.schedule.program import Program
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.stage_layout import StageLayout, parse_layout


@dataclass(frozen=True)
class Stage:
    """The contents of one stage: layers by their number in the model, multi-token prediction layers by their depth (the
    first is 1), and whether it begins or ends the model. `aside` streams were set aside before it."""

    number: int
    embeds: bool
    layers: range
    ahead: range
    predicts: bool
    aside: int

    @property
    def uses_final_norm(self) -> bool:
        """Whether the model's last norm is used here: by the head, or by the first multi-token prediction layer."""
        return self.predicts or 1 in self.ahead

    @property
    def uses_embedding(self) -> bool:
        """Whether token ids are looked up here."""
        return self.embeds or len(self.ahead) > 0


def whole_model_stage(model: ModelConfig) -> Stage:
    """All of the model as one stage."""
    layers = range(model.layers)
    ahead = range(1, model.mtp + 1)
    return Stage(0, embeds=True, layers=layers, ahead=ahead, predicts=True, aside=0)


def layout_letters(model: ModelConfig) -> str:
    """The pieces of the model in the letters of a layout. Layers are called dense only where they come first."""
    dense = min(model.moe.dense_layers, model.layers)
    later = model.layers - dense
    return f"E{'d' * dense}{'t' * later}{'m' * model.mtp}L"


def summed_step_flops(steps: Sequence[StepSpec], seq_len: int) -> float:
    return sum(step.flops(seq_len) for step in steps)


def flops_of_each_piece(model: ModelConfig, seq_len: int) -> list[float]:
    """FLOPs of each piece. The embedding costs bytes instead: it counts as a hundredth of a layer."""
    layers: list[float] = []
    for layer in range(model.layers):
        block = block_step_specs(model, layer)
        flops = summed_step_flops(block, seq_len)
        layers.append(flops)
    ahead: list[float] = []
    for depth in range(model.mtp):
        block = block_step_specs(model, model.layers + depth)
        steps = [look_ahead_step(model), *block]
        flops = summed_step_flops(steps, seq_len)
        ahead.append(flops)
    embedding = min(layers) / 100
    predict = predict_step(model)
    head = predict.flops(seq_len)
    return [embedding, *layers, *ahead, head]


def pipeline_layout(config: Config) -> StageLayout:
    """The user's layout, or a proposed one."""
    if config.pipeline.layout:
        return parse_layout(config.pipeline.layout)
    stages = config.parallel.pp * config.pipeline.vpp
    return cached_layout_proposal(config.model, config.data.seq_len, stages)


@lru_cache(maxsize=1024)
def cached_layout_proposal(model: ModelConfig, seq_len: int, count: int) -> StageLayout:
    """Cached, since a search asks for the same cut many times."""
    letters = layout_letters(model)
    flops = flops_of_each_piece(model, seq_len)
    return propose_layout(letters, flops, count)


def pipeline_stages(config: Config) -> list[Stage]:
    """Every stage of the run, in order."""
    layout = pipeline_layout(config)
    stages: list[Stage] = []
    for number, pieces in enumerate(layout.stages):
        depths = layout.mtp_layers(number)
        first = depths.start + 1
        stage = Stage(
            number,
            embeds="E" in pieces,
            layers=layout.layers(number),
            ahead=range(first, depths.stop + 1),
            predicts="L" in pieces,
            aside=first if depths.start else 0,  # with the model's own stream
        )
        stages.append(stage)
    return stages


def rank_of_each_stage(config: Config) -> list[int]:
    """The pipeline rank that holds each stage."""
    ranks = config.parallel.pp
    schedule = SCHEDULES[config.pipeline.schedule]
    stages = range(ranks * config.pipeline.vpp)
    return [schedule.rank_of(stage, ranks) for stage in stages]


def embedding_ranks(config: Config) -> list[int]:
    """The pipeline ranks that hold a copy of the embedding: its gradient is the sum over them."""
    ranks = rank_of_each_stage(config)
    holders: set[int] = set()
    for stage in pipeline_stages(config):
        uses_tied_head = stage.predicts and config.model.tied_head
        if stage.uses_embedding or uses_tied_head:
            holders.add(ranks[stage.number])
    return sorted(holders)


def final_norm_ranks(config: Config) -> list[int]:
    """The pipeline ranks that hold a copy of the last norm."""
    ranks = rank_of_each_stage(config)
    holders: set[int] = set()
    for stage in pipeline_stages(config):
        if stage.uses_final_norm:
            holders.add(ranks[stage.number])
    return sorted(holders)


def pipeline_program(config: Config, microbatches: int) -> Program:
    """The slots of every pipeline rank in one training step."""
    pipeline = config.pipeline
    pp = config.parallel.pp
    program = build_program(pipeline.schedule, pp, pipeline.vpp, microbatches)
    return apply_passes(program, pair_kind(pipeline), pipeline.defer)


def pair_kind(pipeline: PipelineConfig) -> PairKind:
    """Which passes share slots."""
    return pipeline.pairs if pipeline.pair else "none"
