"""How many microbatches each stage of a rank holds when, read off the program that the rank will run.

A forward adds a microbatch to its stage, the data gradient takes it away and leaves what the weight gradient still
needs, and that takes the rest. Only states that no other surpasses can be a rank's peak, so those are all a plan needs;
they are found once for each schedule and serve every model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from moefold.schedule.catalog import SCHEDULES, program_of
from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import Program, Slot


class State(NamedTuple):
    """While `kind` runs on the rank's `chunk`-th stage: live microbatches by chunk, and those whose weight gradients
    wait."""

    kind: str
    chunk: int
    live: tuple[int, ...]
    waiting: tuple[int, ...]


@lru_cache(maxsize=4096)
def states_of(schedule: str, pp: int, vpp: int, microbatches: int, pair: bool, defer: bool) -> list[list[State]]:
    """For each rank the states that may be its peak."""
    program = program_of(schedule, pp, vpp, enough(schedule, pp, vpp, microbatches))
    program = pair_forward_with_backward(program) if pair else program
    program = defer_weight_grads(program) if defer else program
    return states(program, [SCHEDULES[schedule].stages_of(rank, pp, vpp) for rank in range(pp)])


def states(program: Program, stages: list[list[int]]) -> list[list[State]]:
    return [highest(walked(slots, held)) for slots, held in zip(program, stages, strict=True)]


def enough(schedule: str, pp: int, vpp: int, microbatches: int) -> int:
    """As many microbatches as show all that happens: a pipe is full after a few times pp, but for gpipe, which holds
    all. What is left over when groups of pp are made stays the same."""
    few = 4 * pp
    if schedule == "gpipe" or microbatches <= few + pp:
        return microbatches
    return few + microbatches % pp


def walked(slots: list[Slot], stages: list[int]) -> set[State]:
    live, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    found: set[State] = set()
    for slot in slots:
        for op in slot:
            if op.kind == "F":
                live[op.stage] += 1
            found.add(State(op.kind, stages.index(op.stage), tuple(live.values()), tuple(waiting.values())))
            if op.kind == "D":
                live[op.stage] -= 1
                waiting[op.stage] += 1
            if op.kind == "W":
                waiting[op.stage] -= 1
    return found


def highest(found: set[State]) -> list[State]:
    """Those that no other state with the same op surpasses in every count."""

    def surpassed(one: State) -> bool:
        mine = one.live + one.waiting
        return any(
            other != one
            and other[:2] == one[:2]
            and all(a >= b for a, b in zip(other.live + other.waiting, mine, strict=True))
            for other in found
        )

    return sorted(one for one in found if not surpassed(one))
