"""The arithmetic of a rank's memory, line by line, as a person would do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.plan.layer.layer_costs import PieceCount, count_piece
from moefold.plan.memory.peak_memory import RankMemory, fullest_rank, memory_by_rank, stage_counts
from moefold.plan.memory.rank_stages import RankStages, StagePieces, stages_by_rank
from moefold.plan.memory.resident import rank_parameters, replica_count
from moefold.plan.memory.run_setting import GIB, RunSetting, build_run_setting
from moefold.plan.options import PlanChoices

PIECE_NAMES = {"E": "embedding", "t": "layer", "m": "layer ahead", "L": "head"}
NAME_COLUMN = 40  # characters of a line's name, indentation included


def explain_memory(
    config: Config, world: int, choices: PlanChoices | None = None, rank: int | None = None
) -> list[str]:
    """How the memory of a pipeline rank comes about: of the fullest, or of the one asked for."""
    s = build_run_setting(config, world, choices or PlanChoices())
    ranks = memory_by_rank(s)
    if rank is None:
        shown = fullest_rank(ranks)
    elif 0 <= rank < len(ranks):
        shown = ranks[rank]
    else:
        raise UserError(f"no pipeline rank {rank}; there are {len(ranks)}, counted from 0")
    held = stages_by_rank(config)[shown.rank]
    total = format_gib(shown.total)
    lines = [f"pipeline rank {shown.rank} of {len(ranks)}: {total} at its worst moment, {shown.at}"]
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
    yield format_line("gradients", rank.gradients, f"{count:,.0f} x {rank.gradients / count:.3g} B")
    main_bytes = 4 if s.choices.recipe.wide < 4 else 0
    state_bytes = main_bytes + rank.moments / max(1.0, owned_parameters(s, held))
    states = rank.main + rank.moments
    yield format_line("main weights and moments", states, f"{state_bytes:.3g} B for each of its share:")
    parameters = rank_parameters(s, held, stage_counts(s, held))
    for kind, count in sorted(parameters.items()):
        grid, axes = kind
        cut = ""
        if axes:
            cut = f", cut over {' and '.join(axes)}"
        replicas = count_with_noun(replica_count(s, kind), "rank")
        yield f"    {count:,.0f} {grid}{cut}, on {replicas} alike"


def owned_parameters(s: RunSetting, held: RankStages) -> float:
    """Parameters whose optimizer state this rank holds."""
    owned = 0.0
    for kind, count in rank_parameters(s, held, stage_counts(s, held)).items():
        shards = 1 if s.choices.sharding == "none" else replica_count(s, kind)
        owned += count / shards
    return owned


def activation_lines(s: RunSetting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    """Stages by their live microbatches, then each kind of piece with its tensors, once."""
    if not rank.activations:
        return
    live = " + ".join(map(str, rank.live))
    yield format_line("activations", rank.activations, f"microbatches under way on its stages: {live}")
    kinds: dict[tuple[str, int], PieceCount] = {}
    for number, pieces, microbatches in zip(held.numbers, held.pieces, rank.live, strict=True):
        for piece, layer in pieces:
            kinds[piece, layer] = count_piece(s.config.model, piece, layer, s.portion, s.choices)
        kept = sum(kinds[piece].kept for piece in pieces)
        explanation = f"{microbatches} x {format_gib(kept)}: {list_pieces(pieces)}"
        yield format_line(f"stage {number}", microbatches * kept, explanation, depth=2)
    for (piece, layer), count in kinds.items():
        if count.kept:
            name = f"{piece_name(piece, layer)} keeps"
            yield format_line(name, count.kept, "for one microbatch:", depth=2)
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
    items = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return ", ".join(items)


def other_memory_parts(s: RunSetting, rank: RankMemory) -> dict[str, str]:
    return {
        "working": f"what {rank.at} needs for the moment, recomputed tensors included",
        "margin": f"experts with {s.load:.2f} times their even share of rows",
        "buffers": "messages between ranks, angles of positions, workspace of products",
        "graphs": "inputs of captured steps, for each layer and microbatch under way",
        "host": "in host memory, not counted above",
        "outside": "CUDA itself and NCCL, out of torch's sight and not counted above",
    }
