"""The arithmetic of a rank's memory, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.plan.layer.layer_costs import PieceCount
from moefold.plan.memory.peak_memory import RankMemory, fullest_rank, fullest_setting, memory_by_rank, stage_counts
from moefold.plan.memory.rank_stages import RankStages, StagePieces, stages_by_rank
from moefold.plan.memory.replicas import replica_count, shard_count
from moefold.plan.memory.resident import rank_parameters, resident_state
from moefold.plan.memory.run_setting import GIB, RunSetting, build_run_setting
from moefold.plan.options import PlanChoices

PIECE_NAMES = {
    "E": "embedding",
    "t": "layer",
    "m": "MTP layer",
    "L": "head",
}
NAME_COLUMN = 40  # characters of a line's name, indentation included


def explain_memory(
    config: Config,
    world: int,
    choices: PlanChoices | None = None,
    rank: int | None = None,
) -> list[str]:
    """Lines of a pipeline rank's memory: of the given rank, by default of the fullest."""
    setting = build_run_setting(config, world, choices or PlanChoices())
    s = fullest_setting(setting)
    ranks = memory_by_rank(setting)
    if rank is None:
        shown = fullest_rank(ranks)
    elif 0 <= rank < len(ranks):
        shown = ranks[rank]
    else:
        raise UserError(f"no pipeline rank {rank}; there are {len(ranks)}, counted from 0")
    held = stages_by_rank(s.config)[shown.rank]
    total = format_gib(shown.needed)
    lines = [f"pipeline rank {shown.rank} of {len(ranks)}: {total} at its peak, in {shown.at}"]
    if s is not setting:
        lines.append(f"  rows of {s.data.seq_len:,} tokens, shared by {s.parallel.cp} ranks, need most of all sizes")
    lines += resident_lines(s, held, shown)
    lines += activation_lines(s, held, shown)
    for name, explanation in other_memory_parts(s, shown).items():
        size = getattr(shown, name)
        if size:
            lines.append(format_line(name, size, explanation))
    return lines


def format_gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def format_line(name: str, size: float, explanation: str, depth: int = 1) -> str:
    amount = f"{size / 2**20:,.1f} MiB"
    if size >= GIB / 10:
        amount = format_gib(size)
    indent = "  " * depth
    column = NAME_COLUMN - len(indent)
    return f"{indent}{name:<{column}} {amount:>14}   {explanation}".rstrip()


def count_with_noun(count: int, noun: str) -> str:
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"


def resident_lines(s: RunSetting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    count = rank.parameters
    yield format_line("weights", rank.weights, f"{count:,.0f} parameters x {rank.weights / count:.3g} B")
    stages = stage_counts(s, held)
    copies = resident_state(s, held, stages).copies
    if copies:
        yield format_line("quantised copies", copies, "a part of the weights: both layouts, with scales", depth=2)
    yield format_line("gradients", rank.gradients, f"{count:,.0f} x {rank.gradients / count:.3g} B")
    owned = max(1.0, owned_parameters(s, held))
    states = rank.main + rank.moments
    state_bytes = states / owned
    yield format_line("main weights and moments", states, f"{state_bytes:.3g} B per parameter of its shard:")
    parameters = rank_parameters(s, held, stages)
    for kind, count in sorted(parameters.items()):
        grid, axes = kind
        cut = ""
        if axes:
            cut = f", sharded over {' and '.join(axes)}"
        replicas = count_with_noun(replica_count(s, kind), "replica")
        yield f"    {count:,.0f} {grid}{cut}, {replicas}"


def owned_parameters(s: RunSetting, held: RankStages) -> float:
    """Parameters whose optimizer state this rank holds."""
    owned = 0.0
    parameters = rank_parameters(s, held, stage_counts(s, held))
    for kind, count in parameters.items():
        shards = 1
        if s.choices.sharding != "none":
            shards = shard_count(s, kind)
        owned += count / shards
    return owned


def activation_lines(s: RunSetting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    """Lines of activations: stages with their live microbatches, then each kind of piece with its tensors."""
    if not rank.activations:
        return
    live = " + ".join(map(str, rank.live))
    yield format_line("activations", rank.activations, f"live microbatches by stage: {live}")
    kinds: dict[tuple[str, int], PieceCount] = {}
    stages = zip(held.numbers, held.pieces, rank.live, strict=True)
    for number, pieces, microbatches in stages:
        for piece, layer in pieces:
            kinds[piece, layer] = s.count_piece(piece, layer)
        kept = sum(kinds[piece].kept for piece in pieces)
        explanation = f"{microbatches} x {format_gib(kept)}: {list_pieces(pieces)}"
        yield format_line(f"stage {number}", microbatches * kept, explanation, depth=2)
    for (piece, layer), count in kinds.items():
        if count.kept:
            name = f"saved by {piece_name(piece, layer)}"
            yield format_line(name, count.kept, "per microbatch:", depth=2)
            yield from saved_tensor_lines(count)


def saved_tensor_lines(count: PieceCount) -> Iterator[str]:
    for step in count.steps:
        for tensor in step.saved:
            if not tensor.bytes:
                continue
            explanation = tensor.arithmetic
            if tensor.fate != "kept":
                explanation += f"  ({tensor.fate})"
            yield format_line(f"{tensor.step}: {tensor.name}", tensor.bytes, explanation, depth=3)


def piece_name(piece: str, layer: int) -> str:
    name = PIECE_NAMES[piece]
    if piece in "tm":
        return f"{name} {layer}"
    return name


def list_pieces(pieces: StagePieces) -> str:
    """2 x layer 0, head"""
    counts = Counter(piece_name(*piece) for piece in pieces)
    items: list[str] = []
    for name, count in counts.items():
        items.append(name if count == 1 else f"{count} x {name}")
    return ", ".join(items)


def buffer_names(s: RunSetting) -> str:
    names = "pipeline messages, rotary tables, GEMM workspace"
    if s.choices.sharding == "fsdp":
        units = "four units and gradients of two" if s.pipeline.pair else "two units and their gradients"
        names += f", weights of {units}"
    if s.states_on_host and s.choices.stack == "moefold":
        names += ", chunks of states from host memory"
    if s.portion.stashes:
        names += ", the pool of stashed rows"
    if s.parallel.dispatcher == "symmetric" or not {"projections", "heads"}.isdisjoint(s.parallel.tiles):
        names += ", rooms that other ranks write to"
    return names


def other_memory_parts(s: RunSetting, rank: RankMemory) -> dict[str, str]:
    return {
        "working": f"temporaries of {rank.at}, recomputed tensors included",
        "margin": f"experts with {s.load:.2f} times their even share of rows",
        "buffers": buffer_names(s),
        "graphs": "static inputs of captured steps, for each layer and live microbatch",
        "outside": "CUDA context and NCCL buffers, outside torch's allocator",
        "host": "in host memory, not counted above",
    }
