"""Schedules with V-shaped stages: rank r holds stage r on the way down and stage 2p - 1 - r on the way up.

    rank 0    0           7      rank 0 holds the embedding and the loss: the first backward follows its own forward
    rank 1      1       6        and needs no message; all ranks have the same number of live chunks
    rank 2        2   5
    rank 3          3 4

Both schedules are written phase by phase, from the published figures. The phases are those of many microbatches. For
few, the program is built for enough microbatches and ops of the missing ones are dropped, which breaks no dependency.
"""

from __future__ import annotations

from collections import Counter, deque

from moefold.schedule.program import OpKind, PipelineOp, Program, RankSlots


def zero_bubble_v(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """ZB-V: a bubble of p - 1 with the memory of 1F1B. With F = D = W = 1 per stage: 6m + p - 1 and 2p live chunks.

    Needs 2p - 1 microbatches for that.
    """
    enough = max(microbatches, 2 * ranks - 1)
    program: Program = []
    for rank in range(ranks):
        slots = zero_bubble_v_rank(rank, ranks, enough)
        program.append(slots)
    return drop_extra_microbatches(program, microbatches)


def zero_bubble_v_rank(rank: int, ranks: int, microbatches: int) -> RankSlots:
    down = rank
    up = 2 * ranks - 1 - rank
    ranks_below = ranks - rank  # this rank included
    writer = SlotWriter()
    # Warm-up: forwards until the first microbatch returns to this rank.
    for _ in range(2 * ranks_below - 1):
        writer.add_slot("F", down)
    for _ in range(rank):
        writer.add_slot("F", up)
        writer.add_slot("F", down)
    # Until the first backward returns to this rank too.
    for _ in range(ranks_below):
        writer.add_slot("F", up)
        writer.add_data_and_weight_grad(up)
    # Steady state: forward and backward on both stages.
    last_forward_down = microbatches - 2 * ranks + rank
    for tick in range(microbatches - ranks):
        if tick <= last_forward_down:
            writer.add_slot("F", down)
        writer.add_data_and_weight_grad(down)
        writer.add_slot("F", up)
        writer.add_data_and_weight_grad(up)
    # Drain: data gradients that other ranks need first, then the deferred weight gradients.
    for _ in range(rank):
        writer.add_slot("D", down)
        writer.add_slot("D", up)
    for _ in range(ranks_below):
        writer.add_data_and_weight_grad(down)
    for _ in range(rank):
        writer.add_slot("W", up)
    for _ in range(rank):
        writer.add_slot("W", down)
    return writer.slots


def dualpipe_v(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """DualPipe-V: in the steady state every slot pairs a forward with a backward of the other stage.

    With F = D = W = 1 per stage: 6m + 2 (p - 1) unpaired, and 2p + 1 live chunks. Needs 2p microbatches for that.
    """
    enough = max(microbatches, 2 * ranks)
    program: Program = []
    for rank in range(ranks):
        slots = dualpipe_v_rank(rank, ranks, enough)
        program.append(slots)
    return drop_extra_microbatches(program, microbatches)


def dualpipe_v_rank(rank: int, ranks: int, microbatches: int) -> RankSlots:
    down = rank
    up = 2 * ranks - 1 - rank
    ranks_below = ranks - rank - 1
    writer = SlotWriter()
    # Warm-up: forwards down, then on both stages, then the first backwards up.
    for _ in range(2 * ranks_below):
        writer.add_slot("F", down)
    for _ in range(rank + 1):
        writer.add_slot("F", down)
        writer.add_slot("F", up)
    for _ in range(ranks_below):
        writer.add_data_and_weight_grad(up)
        writer.add_slot("F", up)
    # Steady state: pairs. At the bottom of the V the first backward is too late for a pair.
    steady_ticks = microbatches - 2 * ranks + rank + 1
    for tick in range(steady_ticks):
        if ranks_below == 0 and tick == 0:
            writer.add_slot("F", down)
            writer.add_slot("DW", up)
        else:
            writer.add_slot("FDW", down, up)
        writer.add_slot("FDW", up, down)
    # Drain: the first half of the backwards whole, then data gradients before deferred weight gradients.
    for _ in range(ranks_below):
        writer.add_slot("DW", up)
        writer.add_slot("FDW", up, down)
    for tick in range(2 * (rank + 1)):
        kinds = "DW" if tick <= rank else "D"
        stage = down if tick % 2 else up
        writer.add_slot(kinds, stage)
    for _ in range(ranks_below):
        writer.add_deferred_wgrad()
        writer.add_slot("D", down)
    while writer.deferred:
        writer.add_deferred_wgrad()
    return writer.slots


class SlotWriter:
    """Writer of one rank's slots, in order: each op has the next microbatch of its kind and stage."""

    def __init__(self) -> None:
        self.slots: RankSlots = []
        self.deferred: deque[PipelineOp] = deque()  # weight gradients whose data gradient has run
        self.next_microbatch: Counter[tuple[str, int]] = Counter()

    def add_slot(self, kinds: str, stage: int, backward_stage: int | None = None) -> None:
        """One slot: "F", "D", "W", "DW", or "FDW" with the forward on `stage` and the backward on `backward_stage`."""
        ops: list[PipelineOp] = []
        if "F" in kinds:
            forward = self.next_op("F", stage)
            ops.append(forward)
        if backward_stage is not None:
            stage = backward_stage
        if "D" in kinds:
            data_grad = self.next_op("D", stage)
            ops.append(data_grad)
            wgrad = data_grad._replace(kind="W")
            self.deferred.append(wgrad)
        if "W" in kinds:
            oldest = self.oldest_wgrad(stage)
            ops.append(oldest)
        self.slots.append(tuple(ops))

    def add_data_and_weight_grad(self, stage: int) -> None:
        """A backward in two slots."""
        self.add_slot("D", stage)
        self.add_slot("W", stage)

    def add_deferred_wgrad(self) -> None:
        """A slot with the oldest deferred weight gradient, if there is one."""
        if self.deferred:
            oldest = self.deferred.popleft()
            self.slots.append((oldest,))

    def oldest_wgrad(self, stage: int) -> PipelineOp:
        oldest = next(op for op in self.deferred if op.stage == stage)
        self.deferred.remove(oldest)
        return oldest

    def next_op(self, kind: OpKind, stage: int) -> PipelineOp:
        microbatch = self.next_microbatch[kind, stage]
        self.next_microbatch[kind, stage] += 1
        return PipelineOp(kind, stage, microbatch)


def drop_extra_microbatches(program: Program, microbatches: int) -> Program:
    """The program without ops of microbatches that do not exist."""
    return [drop_from_rank(slots, microbatches) for slots in program]


def drop_from_rank(slots: RankSlots, microbatches: int) -> RankSlots:
    remaining: RankSlots = []
    for slot in slots:
        ops = tuple(op for op in slot if op.microbatch < microbatches)
        if ops:
            remaining.append(ops)
    return remaining
