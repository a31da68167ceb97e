"""What a step needs for the moment beside what is kept: the largest of its moments, forward and backward, as tables.

A moment is a set of tensors that are there at once. The lines are written as those of `plan/saved.py`.
"""

from __future__ import annotations

from moefold.plan.saved import HELD, C, D, Kept, R, T
from moefold.plan.sizes import Sizes

CHUNK_LOGITS = 1 << 26  # as kernels/cross_entropy.py holds at a time; a test keeps the two the same
PADDING = 64  # rows that the fused kernel may add for each expert

Moment = tuple[Kept, ...]


def line(name: str, rows, width, held: str = "wide", when=lambda s: True) -> Kept:
    return Kept(name, "", rows, width, held, when=when)


def fused(s: Sizes) -> bool:
    return s.fused


def unfused(s: Sizes) -> bool:
    return not s.fused


def padded(s: Sizes) -> float:
    return s.R + PADDING * s.e


def chunk(s: Sizes) -> float:
    """Logits that the head holds at a time."""
    return min(CHUNK_LOGITS, s.C * s.P)


def one(s: Sizes) -> float:
    return 1.0


STREAM = line("gradient of the stream", T, D)
EXPERT_WEIGHTS = line("gradients of the experts' weights", lambda s: s.e * s.W, lambda s: 3 * s.F)

MOEFOLD: dict[tuple[str, str], tuple[Moment, ...]] = {
    ("experts", "F"): (
        (
            line("rows", R, lambda s: s.W, when=fused),
            line("activated", R, lambda s: s.F, when=fused),
            line("results", R, lambda s: s.W),
        ),
    ),
    ("experts", "B"): (
        (
            STREAM,
            line("gradient of results", R, lambda s: s.W),
            line("gradient of gate and up", padded, lambda s: 2 * s.F),
            line("rows again", R, lambda s: s.W),
            line("gradient of what arrived", lambda s: s.N, lambda s: s.W),
            EXPERT_WEIGHTS,
        ),
    ),
    ("attend", "B"): (
        (
            STREAM,
            line("gradients of q k v and the result", C, lambda s: 2 * s.H * s.Q + s.G * (s.Q + s.V)),
            line("the same in fp32, to turn them back", C, lambda s: 2 * s.H * s.Q, "fp32"),
        ),
    ),
    ("mlp", "B"): (
        (
            STREAM,
            line("gradient of gate and up, in fp32 and rounded", C, lambda s: 2 * s.M * 6, "byte"),
            line("what it is made of, in fp32", C, lambda s: 6 * s.M, "fp32"),
        ),
    ),
    ("shared", "B"): (
        (
            STREAM,
            line("gradient of gate and up, in fp32 and rounded", C, lambda s: 2 * s.A * 6, "byte"),
            line("what it is made of, in fp32", C, lambda s: 6 * s.A, "fp32"),
        ),
    ),
    ("predict", "F"): (
        (line("logits of a chunk and their exponentials", chunk, one, "fp32"),) * 2,
        (
            line("gradient of a chunk's logits", chunk, one),
            line("its part of the head's gradient", lambda s: s.P, D),
        ),
    ),
    ("predict", "B"): (
        (
            line("gradient of the stream", T, lambda s: 2 * s.D),
            line("gradient of the head, scaled", lambda s: s.P, D, "fp32"),
            line("gradient of the head, rounded", lambda s: s.P, D),
        ),
    ),
}
MEGATRON: dict[tuple[str, str], tuple[Moment, ...]] = {
    ("experts", "B"): (
        (
            STREAM,
            line("gradient of results", R, lambda s: s.W),
            line("gradient of gate and up", R, lambda s: 2 * s.F),
            line("gradient of rows", R, lambda s: s.W),
        ),
    ),
    ("attend", "B"): ((STREAM, line("gradients of q k v", C, lambda s: s.H * s.Q + s.G * (s.Q + s.V))),),
    ("mlp", "B"): ((STREAM, line("gradient of gate and up", C, lambda s: 2 * s.M)),),
    ("predict", "B"): ((line("gradient of the logits", C, lambda s: s.P),),),
}
TABLES = {"moefold": MOEFOLD, "megatron": MEGATRON}


def working_of(step: str, way: str, s: Sizes) -> float:
    """Bytes of the step's largest moment, F forward or B backward."""
    moments = TABLES[s.choices.stack].get((step, way), ())
    return max((sum(bytes_of(each, s) for each in moment if each.when(s)) for moment in moments), default=0.0)


def bytes_of(each: Kept, s: Sizes) -> float:
    return each.rows(s) * each.width(s) * HELD[each.held](s.choices.recipe)
