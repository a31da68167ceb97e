"""The arithmetic behind a rank's memory, line by line, as a person would do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.plan.layer.layer_costs import PieceCount, count_piece
from moefold.plan.memory.peak_memory import RankMemory, fullest_rank, memory_by_rank
from moefold.plan.memory.rank_stages import RankStages, StagePieces, count_stage, stages_by_rank
from moefold.plan.memory.resident import rank_parameters, replica_count
from moefold.plan.memory.run_setting import GIB, RunSetting, build_run_setting
from moefold.plan.options import PlanChoices

PIECE_NAMES = {"E": "embedding", "t": "layer", "m": "layer ahead", "L": "head"}


def explain_memory(
    config: Config, world: int, choices: PlanChoices | None = None, rank: int | None = None
) -> list[str]:
    """How the memory of a pipeline rank comes about: of the fullest, or of the one asked for."""
    s = build_run_setting(config, world, choices or PlanChoices())
    ranks = memory_by_rank(s)
    if rank is not None and not 0 <= rank < len(ranks):
        raise UserError(f"no pipeline rank {rank}; there are {len(ranks)}, counted from 0")
    shown = fullest_rank(ranks) if rank is None else ranks[rank]
    held = stages_by_rank(config)[shown.rank]
    return [
        f"pipeline rank {shown.rank} of {len(ranks)}: {format_gib(shown.total)} at its worst moment, {shown.at}",
        *resident_lines(s, held, shown),
        *activation_lines(s, held, shown),
        *(
            format_line(name, getattr(shown, name), how)
            for name, how in other_memory_parts(s, shown).items()
            if getattr(shown, name)
        ),
    ]


def format_gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def format_line(name: str, size: float, how: str, depth: int = 1) -> str:
    amount = format_gib(size) if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
    return f"{'  ' * depth}{name:<{40 - 2 * depth}} {amount:>14}   {how}".rstrip()


def count_with_noun(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def resident_lines(s: RunSetting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    stages = [count_stage(s.config.model, pieces, s.portion, s.choices) for pieces in held.pieces]
    count = rank.parameters
    yield format_line("weights", rank.weights, f"{count:,.0f} parameters x {rank.weights / count:.3g} B")
    yield format_line("gradients", rank.gradients, f"{count:,.0f} x {rank.gradients / count:.3g} B")
    each = 4 * (s.choices.recipe.wide < 4) + rank.moments / max(1.0, owned_parameters(s, held))
    yield format_line("main weights and moments", rank.main + rank.moments, f"{each:.3g} B for each of its share:")
    for kind, parameters in sorted(rank_parameters(s, held, stages).items()):
        grid, axes = kind
        cut = f", cut over {' and '.join(axes)}" if axes else ""
        yield f"    {parameters:,.0f} {grid}{cut}, on {count_with_noun(replica_count(s, kind), 'rank')} alike"


def owned_parameters(s: RunSetting, held: RankStages) -> float:
    stages = [count_stage(s.config.model, pieces, s.portion, s.choices) for pieces in held.pieces]
    kinds = rank_parameters(s, held, stages)
    whole = s.choices.sharding == "none"
    return sum(count / (1 if whole else replica_count(s, kind)) for kind, count in kinds.items())


def activation_lines(s: RunSetting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    """Stages by their live microbatches, then each kind of piece with its tensors, once."""
    if not rank.activations:
        return
    live = " + ".join(map(str, rank.live))
    yield format_line("activations", rank.activations, f"microbatches under way on its stages: {live}")
    kinds: dict[tuple[str, int], PieceCount] = {}
    for number, pieces, n in zip(held.numbers, held.pieces, rank.live, strict=True):
        counts = {key: count_piece(s.config.model, *key, s.portion, s.choices) for key in pieces}
        kinds |= counts
        kept = sum(counts[key].kept for key in pieces)
        yield format_line(f"stage {number}", n * kept, f"{n} x {format_gib(kept)}: {list_pieces(pieces)}", depth=2)
    for (piece, layer), count in kinds.items():
        if count.kept:
            yield format_line(f"{piece_name(piece, layer)} keeps", count.kept, "for one microbatch:", depth=2)
            yield from saved_tensor_lines(count)


def saved_tensor_lines(count: PieceCount) -> Iterator[str]:
    for tensor in (tensor for step in count.steps for tensor in step.saved if tensor.bytes):
        fate = "" if tensor.fate == "kept" else f"  ({tensor.fate})"
        yield format_line(f"{tensor.step}: {tensor.name}", tensor.bytes, tensor.how + fate, depth=3)


def piece_name(piece: str, layer: int) -> str:
    return f"{PIECE_NAMES[piece]} {layer}" if piece in "tm" else PIECE_NAMES[piece]


def list_pieces(pieces: StagePieces) -> str:
    """2 x layer 0, head"""
    counted = Counter(piece_name(*piece) for piece in pieces)
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())


def other_memory_parts(s: RunSetting, rank: RankMemory) -> dict[str, str]:
    return {
        "working": f"what {rank.at} needs for the moment, recomputed tensors included",
        "margin": f"experts with {s.load:.2f} times their even share of rows",
        "buffers": "messages between ranks, angles of positions, workspace of products",
        "graphs": "inputs of captured steps, for each layer and microbatch under way",
        "host": "in host memory, not counted above",
        "outside": "CUDA itself and NCCL, out of torch's sight and not counted above",
    }
