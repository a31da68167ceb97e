"""Pipeline stages as a plan sees them: which pieces each holds, on which rank, and what one microbatch costs there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from moefold.anatomy.stage_contents import Stage, pipeline_stages, rank_of_each_stage
from moefold.config.run import Config, DataConfig, ModelConfig, ParallelConfig, PipelineConfig
from moefold.plan.layer.layer_costs import ParameterClass, count_piece, first_alike_layers
from moefold.plan.layer.rank_shapes import RankPortion
from moefold.plan.options import PlanChoices

StagePieces = tuple[tuple[str, int], ...]  # of a stage: letters as in a layout, each with the first layer that is alike


@dataclass(frozen=True)
class StageCount:
    """One microbatch on one stage of one rank, in bytes: what it keeps until its data gradient, what of that is made
    again or comes back from the host, what waits for weight gradients computed apart, and what forward and backward
    need beside. Parameters are counted by class. `way_back` has for each step, as backward comes to it, what is gone by
    then, parameters that have their gradients, and what it needs beside."""

    parameters: tuple[tuple[ParameterClass, float], ...]
    quantized: float
    kept: float
    restored_bytes: float
    offloaded: float
    waiting: float
    forward: float
    backward: float
    backward_steps: tuple[tuple[float, float, float], ...]


def pieces_of_stage(model: ModelConfig, stage: Stage) -> StagePieces:
    same = first_alike_layers(model)
    return (
        *([("E", 0)] if stage.embeds else []),
        *(("t", same[layer]) for layer in stage.layers),
        *(("m", same[model.layers + depth - 1]) for depth in stage.ahead),
        *([("L", 0)] if stage.predicts else []),
    )


@lru_cache(maxsize=65_536)
def count_stage(
    model: ModelConfig, pieces: StagePieces, portion: RankPortion, choices: PlanChoices, load: float = 1.0
) -> StageCount:
    counts = [count_piece(model, piece, layer, portion, choices, load) for piece, layer in pieces]
    parameters: Counter[ParameterClass] = Counter()
    for piece in counts:
        parameters.update(piece.parameters)
    later = forward = backward = done = 0.0  # what later steps keep is not there yet, or gone again
    way_back: list[tuple[float, float, float]] = []
    for piece in reversed(counts):
        for step in reversed(piece.steps):
            needs = step.working[1] + piece.restored_bytes
            forward, backward = max(forward, step.working[0] - later), max(backward, needs - later)
            way_back.append((later, done, needs))
            later += step.kept
            done += sum(count for _, count in step.parameters)
    steps = [step for piece in counts for step in piece.steps]
    return StageCount(
        tuple(parameters.items()),
        sum(step.quantized for step in steps),
        later,
        sum(piece.restored_bytes for piece in counts),
        sum(t.bytes for step in steps for t in step.saved if t.fate == "offloaded"),
        sum(step.waiting for step in steps),
        forward,
        backward,
        tuple(way_back),
    )


RankKind = tuple[tuple[StagePieces, ...], bool, int]


@dataclass(frozen=True)
class RankStages:
    """The stages a pipeline rank holds, by number, with their pieces. `copies`: it holds the embedding for layers that
    look ahead, or for a tied head, and not for the model's beginning."""

    numbers: tuple[int, ...]
    pieces: tuple[StagePieces, ...]
    copies: bool
    aside: int

    @property
    def kind(self) -> RankKind:
        """Ranks of one kind hold the same."""
        return self.pieces, self.copies, self.aside


def stages_by_rank(config: Config) -> list[RankStages]:
    c, p = config.pipeline, config.parallel
    return arrange_stages(config.model, config.data.seq_len, p.pp, c.vpp, c.schedule, c.layout)


@lru_cache(maxsize=4096)
def arrange_stages(model: ModelConfig, seq_len: int, pp: int, vpp: int, schedule: str, layout: str) -> list[RankStages]:
    """Cutting a model evenly takes milliseconds, and a search asks for the same cut often."""
    config = Config(
        model=model,
        data=DataConfig(seq_len=seq_len),
        parallel=ParallelConfig(pp=pp),
        pipeline=PipelineConfig(schedule=schedule, vpp=vpp, layout=layout),  # pyright: ignore[reportArgumentType]
    )
    stages, homes = pipeline_stages(config), rank_of_each_stage(config)
    found: list[RankStages] = []
    for rank in range(pp):
        held = [stage for stage, home in zip(stages, homes, strict=True) if home == rank]
        needs = any(stage.uses_embedding or (stage.predicts and model.tied_head) for stage in held)
        found.append(
            RankStages(
                tuple(stage.number for stage in held),
                tuple(pieces_of_stage(model, stage) for stage in held),
                needs and not any(stage.embeds for stage in held),
                max(stage.aside for stage in held),
            )
        )
    return found
