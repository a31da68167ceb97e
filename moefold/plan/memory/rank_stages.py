"""Pipeline stages of each rank in a plan: the pieces of each stage, and the bytes of one microbatch on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from moefold.anatomy.stage_contents import Stage, pipeline_stages, rank_of_each_stage
from moefold.config.memory_regions import entries_of_expert_weights, entries_of_regions
from moefold.config.run import Config, DataConfig, ModelConfig, ParallelConfig, PipelineConfig, PrecisionConfig
from moefold.plan.layer.layer_costs import ParameterClass, PieceCount, StepCount, count_piece, first_alike_layers
from moefold.plan.layer.rank_shapes import RankPortion
from moefold.plan.memory.gradient_buckets import gradients_before_steps
from moefold.plan.options import PlanChoices

StagePieces = tuple[tuple[str, int], ...]  # letters as in a layout, each with the first layer of the same kind
BackwardStep = tuple[float, float, float]  # bytes freed so far, parameters with gradients, workspace


class LayerEntries(NamedTuple):
    """Entries of `memory` and `optim.groups` by which layers differ."""

    recompute: tuple[str, ...]
    offload: tuple[str, ...]
    groups: tuple[str, ...]
    expert_weights: tuple[str, ...]


@dataclass(frozen=True)
class StageCount:
    """Bytes of one microbatch on one stage of one rank: kept until the data gradient, restored (recomputed or copied
    from the host), offloaded, in pages of a stash, held for deferred weight gradients (`waiting`), and the workspaces
    of forward and backward. Parameters are counted by class; `copies`: bytes of their quantised copies; `requantised`:
    bytes moved to make FP8 copies of the recipes anew. `backward_steps`: per step in backward order (bytes freed so
    far, parameters whose gradients have memory, workspace)."""

    parameters: tuple[tuple[ParameterClass, float], ...]
    quantized: float
    copies: float
    requantised: float
    kept: float
    restored_bytes: float
    offloaded: float
    stash_pages: float
    waiting: float
    forward: float
    backward: float
    backward_steps: tuple[BackwardStep, ...]


def pieces_of_stage(model: ModelConfig, stage: Stage, precision: PrecisionConfig, entries: LayerEntries) -> StagePieces:
    alike = first_alike_layers(model, precision, *entries)
    pieces: list[tuple[str, int]] = []
    if stage.embeds:
        pieces.append(("E", 0))
    for layer in stage.layers:
        pieces.append(("t", alike[layer]))
    for depth in stage.ahead:
        layer = model.layers + depth - 1
        pieces.append(("m", alike[layer]))
    if stage.predicts:
        pieces.append(("L", 0))
    return tuple(pieces)


@lru_cache(maxsize=65_536)
def count_stage(
    model: ModelConfig,
    pieces: StagePieces,
    portion: RankPortion,
    choices: PlanChoices,
    load: float = 1.0,
) -> StageCount:
    counts: list[PieceCount] = []
    parameters: Counter[ParameterClass] = Counter()
    for piece, layer in pieces:
        count = count_piece(model, piece, layer, portion, choices, load)
        counts.append(count)
        parameters.update(count.parameters)

    # From the last step back: bytes saved by later steps do not exist yet in forward, and are freed again in backward,
    # except for bytes that wait for a deferred weight gradient.
    saved_later = 0.0
    freed = 0.0
    forward = 0.0
    backward = 0.0
    in_backward = [step.spec for count in reversed(counts) for step in reversed(count.steps)]
    with_gradients = gradients_before_steps(in_backward, portion.degrees)
    backward_steps: list[BackwardStep] = []
    numbered = list(enumerate(counts))
    layers = [number for number, (piece, _) in enumerate(pieces) if piece in "tm"]
    last_layer = max(layers, default=0)
    # Behind a stage without the loss, the last layer is on its way until the next forward has passed its first piece.
    behind = counts[-1].offloaded if pieces and pieces[-1][0] != "L" else 0.0
    for number, count in reversed(numbered):
        # The layer before is on its way to the host in forward, and on its way back in backward; so is, in forward, the
        # layer before that one, except in the last layer and behind it.
        neighbour = counts[number - 1].offloaded if number else 0.0
        leaving = neighbour if number else behind
        if 2 <= number < last_layer:
            leaving += counts[number - 2].offloaded
        for step in reversed(count.steps):
            own = count.offloaded_through(step)
            forward_workspace, backward_workspace = step.working
            forward_workspace += leaving + own + step.stashed
            workspace = backward_workspace + count.recomputed_at(step) + neighbour + own + behind + step.stashed
            forward = max(forward, forward_workspace - saved_later)
            backward = max(backward, workspace - freed)
            gradients = with_gradients[len(backward_steps)]
            backward_steps.append((freed, gradients, workspace))
            saved_later += step.kept
            freed += step.kept
            if portion.defers_wgrad:
                freed -= step.waiting

    steps: list[StepCount] = []
    for piece in counts:
        steps += piece.steps
    return StageCount(
        parameters=tuple(parameters.items()),
        quantized=sum(step.quantized for step in steps),
        copies=sum(step.copies for step in steps),
        requantised=sum(step.requantised for step in steps),
        kept=saved_later,
        restored_bytes=sum(piece.restored_bytes for piece in counts),
        offloaded=sum(piece.offloaded for piece in counts),
        stash_pages=sum(step.stash_pages for step in steps),
        waiting=sum(step.waiting for step in steps),
        forward=forward,
        backward=max(backward, -freed),
        backward_steps=tuple(backward_steps),
    )


RankKind = tuple[tuple[StagePieces, ...], bool, int]


@dataclass(frozen=True)
class RankStages:
    """Stages of a pipeline rank, by number, with their pieces. `copies_embedding`: the rank holds a second copy of the
    embedding, for MTP layers or a tied head. `aside`: streams that are held until their loss."""

    numbers: tuple[int, ...]
    pieces: tuple[StagePieces, ...]
    copies_embedding: bool
    aside: int

    @property
    def kind(self) -> RankKind:
        """Kind of the rank; ranks of one kind have the same memory."""
        return self.pieces, self.copies_embedding, self.aside


def stages_by_rank(config: Config) -> list[RankStages]:
    pipeline = config.pipeline
    pp = config.parallel.pp
    seq_len = config.data.seq_len
    places = (seq_len, pp, pipeline.vpp, pipeline.schedule, pipeline.layout)
    of_some_layers = tuple(entry for entry in config.memory.recompute if "@" in entry)
    offload = config.memory.offload
    regions = entries_of_regions(offload)
    entries = LayerEntries(of_some_layers, regions, config.optim.groups, entries_of_expert_weights(offload))
    return arrange_stages(config.model, *places, config.precision, entries)


@lru_cache(maxsize=4096)
def arrange_stages(
    model: ModelConfig,
    seq_len: int,
    pp: int,
    vpp: int,
    schedule: str,
    layout: str,
    precision: PrecisionConfig,
    entries: LayerEntries,
) -> list[RankStages]:
    """Stages of every rank. Cached: an even cut takes milliseconds, and a search needs the same cut often."""
    pipeline = PipelineConfig(schedule=schedule, vpp=vpp, layout=layout)  # pyright: ignore[reportArgumentType]
    data = DataConfig(seq_len=seq_len)
    parallel = ParallelConfig(pp=pp)
    config = Config(model=model, data=data, parallel=parallel, pipeline=pipeline)
    stages_of = defaultdict[int, list[Stage]](list)
    stages = pipeline_stages(config)
    homes = rank_of_each_stage(config)
    for stage, rank in zip(stages, homes, strict=True):
        stages_of[rank].append(stage)
    by_rank: list[RankStages] = []
    for rank in range(pp):
        of_rank = rank_stages(model, stages_of[rank], precision, entries)
        by_rank.append(of_rank)
    return by_rank


def rank_stages(
    model: ModelConfig,
    stages: list[Stage],
    precision: PrecisionConfig,
    entries: LayerEntries,
) -> RankStages:
    embeds = any(stage.embeds for stage in stages)
    reads_embedding = any(stage.uses_embedding for stage in stages)
    has_tied_head = model.tied_head and any(stage.predicts for stage in stages)
    return RankStages(
        numbers=tuple(stage.number for stage in stages),
        pieces=tuple(pieces_of_stage(model, stage, precision, entries) for stage in stages),
        copies_embedding=(reads_embedding or has_tied_head) and not embeds,
        aside=max(stage.aside for stage in stages),
    )
