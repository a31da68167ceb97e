"""Schedules whose stages lie in a V: rank r holds stage r on the way down and stage 2p - 1 - r on the way up.

    rank 0    0           7      rank 0 holds the embedding and the loss, so its first backward follows its own forward
    rank 1      1       6        and needs no message; ranks low in the V have little to fill, ranks high have much,
    rank 2        2   5          and all hold equally many live chunks
    rank 3          3 4

Both are written down phase by phase, from the published figures. The phases are those of many microbatches; with few,
the same program is made for enough of them and what does not exist is left out, which no dependency can notice.
"""

from __future__ import annotations

from collections import Counter, deque

from moefold.schedule.program import OpKind, PipelineOp, Program, Slot


def zero_bubble_v(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """ZB-V: nothing idle but p - 1 in all, at 1F1B's memory: with F = D = W = 1 a stage, 6m + p - 1 and 2p live chunks.

    Needs 2p - 1 microbatches for that.
    """
    enough = max(microbatches, 2 * ranks - 1)
    return drop_extra_microbatches([zero_bubble_v_rank(rank, ranks, enough) for rank in range(ranks)], microbatches)


def zero_bubble_v_rank(rank: int, ranks: int, microbatches: int) -> list[Slot]:
    down, up = rank, 2 * ranks - 1 - rank
    line = SlotWriter()
    for _ in range(2 * (ranks - rank) - 1):  # until the first microbatch comes back up
        line.add("F", down)
    for _ in range(rank):
        line.add("F", up).add("F", down)
    for _ in range(ranks - rank):  # until its backward comes back up too
        line.add("F", up).add("D", up).add("W", up)
    for at in range(microbatches - ranks):
        if at < microbatches - 2 * ranks + rank + 1:
            line.add("F", down)
        line.add("D", down).add("W", down).add("F", up).add("D", up).add("W", up)
    for _ in range(rank):  # what others wait for first
        line.add("D", down).add("D", up)
    for _ in range(ranks - rank):
        line.add("D", down).add("W", down)
    for _ in range(rank):
        line.add("W", up)
    for _ in range(rank):
        line.add("W", down)
    return line.slots


def dualpipe_v(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """DualPipe-V: in the steady state every slot pairs a forward with a backward of the other stage.

    With F = D = W = 1 a stage: 6m + 2 (p - 1) unpaired, and 2p + 1 live chunks. Needs 2p microbatches for that.
    """
    enough = max(microbatches, 2 * ranks)
    return drop_extra_microbatches([dualpipe_v_rank(rank, ranks, enough) for rank in range(ranks)], microbatches)


def dualpipe_v_rank(rank: int, ranks: int, microbatches: int) -> list[Slot]:
    down, up = rank, 2 * ranks - 1 - rank
    line = SlotWriter()
    for _ in range(2 * (ranks - rank - 1)):
        line.add("F", down)
    for _ in range(rank + 1):
        line.add("F", down).add("F", up)
    for _ in range(ranks - rank - 1):
        line.add("D", up).add("W", up).add("F", up)
    for at in range(microbatches - 2 * ranks + rank + 1):
        if rank == ranks - 1 and at == 0:  # at the bottom of the V the first backward is not there in time to pair
            line.add("F", down).add("DW", up)
        else:
            line.add("FDW", down, up)
        line.add("FDW", up, down)
    for _ in range(ranks - rank - 1):
        line.add("DW", up).add("FDW", up, down)
    for at in range(2 * (rank + 1)):  # the first half whole; then weight gradients let others go first
        line.add("DW" if at <= rank else "D", down if at % 2 else up)
    for _ in range(ranks - rank - 1):
        line.add_deferred_wgrad().add("D", down)
    while line.held:
        line.add_deferred_wgrad()
    return line.slots


class SlotWriter:
    """The slots of one rank as they are written: each op takes the next microbatch of its kind and stage."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.held: deque[PipelineOp] = deque()  # weight gradients whose data gradient has run
        self.next: Counter[tuple[str, int]] = Counter()

    def add(self, kinds: str, stage: int, behind: int | None = None) -> SlotWriter:
        """One slot: "F", "D", "W", "DW", or "FDW" with the forward on `stage` and the backward on `behind`."""
        ops = [self.take("F", stage)] if "F" in kinds else []
        stage = stage if behind is None else behind
        if "D" in kinds:
            ops.append(self.take("D", stage))
            self.held.append(PipelineOp("W", stage, ops[-1].microbatch))
        if "W" in kinds:
            ops.append(next(op for op in self.held if op.stage == stage))
            self.held.remove(ops[-1])
        self.slots.append(tuple(ops))
        return self

    def add_deferred_wgrad(self) -> SlotWriter:
        """The weight gradient that has waited longest, if any has."""
        if self.held:
            self.slots.append((self.held.popleft(),))
        return self

    def take(self, kind: OpKind, stage: int) -> PipelineOp:
        self.next[kind, stage] += 1
        return PipelineOp(kind, stage, self.next[kind, stage] - 1)


def drop_extra_microbatches(program: Program, microbatches: int) -> Program:
    """The program without the microbatches that do not exist."""
    kept = [[tuple(op for op in slot if op.microbatch < microbatches) for slot in slots] for slots in program]
    return [[slot for slot in slots if slot] for slots in kept]
