"""The arithmetic behind a rank's memory, line by line, as a person would do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moefold.config.refused import Refused
from moefold.config.run import Config
from moefold.plan.choices import Choices
from moefold.plan.counts import PieceCount, piece_count
from moefold.plan.memory import RankMemory, memory_in, worst
from moefold.plan.setting import GIB, Setting, setting_of
from moefold.plan.stage import Pieces, RankStages, stage_count, stages_by_rank
from moefold.plan.state import parameters_of, replicas

NAMES = {"E": "embedding", "t": "layer", "m": "layer ahead", "L": "head"}


def explain_memory(config: Config, world: int, choices: Choices | None = None, rank: int | None = None) -> list[str]:
    """How the memory of a pipeline rank comes about: of the fullest, or of the one asked for."""
    s = setting_of(config, world, choices or Choices())
    ranks = memory_in(s)
    if rank is not None and not 0 <= rank < len(ranks):
        raise Refused(f"no pipeline rank {rank}; there are {len(ranks)}, counted from 0")
    shown = worst(ranks) if rank is None else ranks[rank]
    held = stages_by_rank(config)[shown.rank]
    return [
        f"pipeline rank {shown.rank} of {len(ranks)}: {gib(shown.total)} at its worst moment, {shown.at}",
        *state_lines(s, held, shown),
        *activation_lines(s, held, shown),
        *(line(name, getattr(shown, name), how) for name, how in rest(s, shown).items() if getattr(shown, name)),
    ]


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def line(name: str, size: float, how: str, depth: int = 1) -> str:
    amount = gib(size) if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
    return f"{'  ' * depth}{name:<{40 - 2 * depth}} {amount:>14}   {how}".rstrip()


def several(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def state_lines(s: Setting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    stages = [stage_count(s.config.model, pieces, s.portion, s.choices) for pieces in held.pieces]
    count = rank.parameters
    yield line("weights", rank.weights, f"{count:,.0f} parameters x {rank.weights / count:.3g} B")
    yield line("gradients", rank.gradients, f"{count:,.0f} x {rank.gradients / count:.3g} B")
    each = 4 * (s.choices.recipe.wide < 4) + rank.moments / max(1.0, shares(s, held))
    yield line("main weights and moments", rank.main + rank.moments, f"{each:.3g} B for each of its share:")
    for kind, parameters in sorted(parameters_of(s, held, stages).items()):
        grid, axes = kind
        cut = f", cut over {' and '.join(axes)}" if axes else ""
        yield f"    {parameters:,.0f} {grid}{cut}, on {several(replicas(s, kind), 'rank')} alike"


def shares(s: Setting, held: RankStages) -> float:
    stages = [stage_count(s.config.model, pieces, s.portion, s.choices) for pieces in held.pieces]
    kinds = parameters_of(s, held, stages)
    whole = s.choices.sharding == "none"
    return sum(count / (1 if whole else replicas(s, kind)) for kind, count in kinds.items())


def activation_lines(s: Setting, held: RankStages, rank: RankMemory) -> Iterator[str]:
    """Stages by their live microbatches, then each kind of piece with its tensors, once."""
    if not rank.activations:
        return
    live = " + ".join(map(str, rank.live))
    yield line("activations", rank.activations, f"microbatches under way on its stages: {live}")
    kinds: dict[tuple[str, int], PieceCount] = {}
    for number, pieces, n in zip(held.numbers, held.pieces, rank.live, strict=True):
        counts = {key: piece_count(s.config.model, *key, s.portion, s.choices) for key in pieces}
        kinds |= counts
        kept = sum(counts[key].kept for key in pieces)
        yield line(f"stage {number}", n * kept, f"{n} x {gib(kept)}: {listed(pieces)}", depth=2)
    for (piece, layer), count in kinds.items():
        if count.kept:
            yield line(f"{named(piece, layer)} keeps", count.kept, "for one microbatch:", depth=2)
            yield from tensor_lines(count)


def tensor_lines(count: PieceCount) -> Iterator[str]:
    for tensor in (tensor for step in count.steps for tensor in step.saved if tensor.bytes):
        fate = "" if tensor.fate == "kept" else f"  ({tensor.fate})"
        yield line(f"{tensor.step}: {tensor.name}", tensor.bytes, tensor.how + fate, depth=3)


def named(piece: str, layer: int) -> str:
    return f"{NAMES[piece]} {layer}" if piece in "tm" else NAMES[piece]


def listed(pieces: Pieces) -> str:
    """2 x layer 0, head"""
    counted = Counter(named(*piece) for piece in pieces)
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())


def rest(s: Setting, rank: RankMemory) -> dict[str, str]:
    return {
        "working": f"what {rank.at} needs for the moment, recomputed tensors included",
        "margin": f"experts with {s.load:.2f} times their even share of rows",
        "buffers": "messages between ranks, angles of positions, workspace of products",
        "graphs": "inputs of captured steps, for each layer and microbatch under way",
        "host": "in host memory, not counted above",
        "outside": "CUDA itself and NCCL, out of torch's sight and not counted above",
    }
