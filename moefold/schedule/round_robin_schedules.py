"""Schedules with round-robin stages: stage s on rank s mod p. Each is (ranks, microbatches, chunks) -> program.

One character per unit of time: forwards of microbatches 0, 1, ... as digits, their data gradients as A, B, ..., their
weight gradients as a, b, ...; dots are bubble.

    gpipe                      1f1b                              zb_h1
    0123.........AaBbCcDd      0123......Aa4Bb5Cc.Dd.Ee.Ff       0123...Aa4Bb5CcDdEeFf
    .0123......AaBbCcDd..      .012....Aa3Bb4Cc5Dd.Ee.Ff..       .012..A3Ba4Cb5DcEdFef
    ..0123...AaBbCcDd....      ..01..Aa2Bb3Cc4Dd5Ee.Ff....       ..01.A2B3Ca4Db5EcFdef
    ...0123AaBbCcDd......      ...0Aa1Bb2Cc3Dd4Ee5Ff......       ...0A1B2C3Da4Eb5Fcdef

In interleaved 1F1B each rank has `chunks` stages, p apart. A group of microbatches runs through one chunk before the
next: the pipeline fills in steps of a chunk, so that the bubble is `chunks` times smaller.
"""

from __future__ import annotations

from itertools import product

from moefold.schedule.passes import defer_weight_grads
from moefold.schedule.program import PipelineOp, Program, RankSlots, Slot


def forward_slot(stage: int, microbatch: int) -> Slot:
    return (PipelineOp("F", stage, microbatch),)


def backward_slot(stage: int, microbatch: int) -> Slot:
    data_grad = PipelineOp("D", stage, microbatch)
    weight_grad = PipelineOp("W", stage, microbatch)
    return (data_grad, weight_grad)


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Program:
    """GPipe: all forwards, chunk by chunk, then all backwards. Makespan (m + p - 1)(f + b); all microbatches live."""
    every = range(microbatches)
    program: Program = []
    for rank in range(ranks):
        stages = range(rank, chunks * ranks, ranks)
        slots: RankSlots = []
        for stage in stages:
            slots += [forward_slot(stage, m) for m in every]
        for stage in reversed(stages):
            slots += [backward_slot(stage, m) for m in every]
        program.append(slots)
    return program


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Program:
    """1F1B: makespan (m + p - 1)(f + b), at most p - r live on rank r. With several chunks, the interleaved form."""
    if chunks > 1:
        return interleaved_1f1b(ranks, microbatches, chunks)
    every = range(microbatches)
    program: Program = []
    for rank in range(ranks):
        forwards = [forward_slot(rank, m) for m in every]
        backwards = [backward_slot(rank, m) for m in every]
        warmup = ranks - rank - 1
        slots = warm_up_and_alternate(forwards, backwards, warmup)
        program.append(slots)
    return program


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Program:
    """Interleaved 1F1B for any number of microbatches: (m + (p - 1) / v)(f + b) when it is a multiple of p.

    Live chunks on rank r: 2 (p - r - 1) + (v - 1) p + 1. Other numbers of microbatches are split into groups of p or
    somewhat more (fewer only if there are fewer), larger groups first. Then no backward of a rank precedes the forward
    that it depends on.
    """
    groups = microbatch_groups(ranks, microbatches)
    order: list[tuple[int, int]] = []  # (chunk, microbatch), the same on every rank
    for group in groups:
        order += product(range(chunks), group)
    largest_group = len(groups[0])

    program: Program = []
    for rank in range(ranks):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forwards: RankSlots = []
        backwards: RankSlots = []
        for chunk, m in order:
            last_chunk_first = chunks - 1 - chunk
            forward = forward_slot(stages[chunk], m)
            backward = backward_slot(stages[last_chunk_first], m)
            forwards.append(forward)
            backwards.append(backward)
        later_ranks = ranks - rank - 1
        warmup = 2 * later_ranks + (chunks - 1) * largest_group
        slots = warm_up_and_alternate(forwards, backwards, warmup)
        program.append(slots)
    return program


def zero_bubble_h1(ranks: int, microbatches: int, chunks: int = 1) -> Program:
    """Zero-bubble H1: 1F1B in which rank r defers r weight gradients. 3m + p - 1 when F = D = W = 1, at most p live."""
    program = one_f_one_b(ranks, microbatches, chunks)
    return defer_weight_grads(program)


def microbatch_groups(ranks: int, microbatches: int) -> list[range]:
    """Microbatches in floor(m / p) groups, at least one; sizes differ by at most one, larger groups first.

    10 over 4 ranks: 0-4, 5-9.   11 over 4 ranks: 0-5, 6-10.   3 over 4 ranks: 0-2.
    """
    count = max(1, microbatches // ranks)
    size, larger_groups = divmod(microbatches, count)
    groups: list[range] = []
    start = 0
    for group in range(count):
        end = start + size
        if group < larger_groups:
            end += 1
        groups.append(range(start, end))
        start = end
    return groups


def warm_up_and_alternate(forwards: RankSlots, backwards: RankSlots, warmup: int) -> RankSlots:
    """Slots of `warmup` forwards, then one forward and one backward alternately, then the remaining backwards."""
    # With few microbatches every forward is part of the warm-up.
    warmup = min(warmup, len(forwards))
    alternating = len(forwards) - warmup
    slots = forwards[:warmup]
    steady_forwards = forwards[warmup:]
    for forward, backward in zip(steady_forwards, backwards, strict=False):
        slots += [forward, backward]
    return slots + backwards[alternating:]
