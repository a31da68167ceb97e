"""Catalog of pipeline schedules: name, summary, legal vpp, and the rank of each stage. The command line, the rules of a
configuration and the trainer read this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.schedule.program import Program
from moefold.schedule.round_robin_schedules import gpipe, interleaved_1f1b, one_f_one_b, zero_bubble_h1
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.v_schedules import dualpipe_v, zero_bubble_v


def round_robin_rank(stage: int, ranks: int) -> int:
    return stage % ranks


def v_shape_rank(stage: int, ranks: int) -> int:
    if stage < ranks:
        return stage
    return 2 * ranks - 1 - stage


@dataclass(frozen=True)
class Schedule:
    """A named order of microbatches. `rank_of(stage, pp)` is the rank that holds a stage."""

    summary: str
    generate: Callable[[int, int, int], Program]
    least_vpp: int = 1
    most_vpp: int | None = None
    rank_of: Callable[[int, int], int] = round_robin_rank

    def accepts_vpp(self, vpp: int) -> bool:
        if self.most_vpp is not None and vpp > self.most_vpp:
            return False
        return vpp >= self.least_vpp

    @property
    def legal_vpp(self) -> str:
        """The legal vpp as text: `1 or more`, `2`."""
        if self.most_vpp is None:
            return f"{self.least_vpp} or more"
        return f"{self.least_vpp}"

    def stages_on_rank(self, rank: int, pp: int, vpp: int) -> list[int]:
        """The stages a rank holds, in the order of the model."""
        stages = range(pp * vpp)
        return [stage for stage in stages if self.rank_of(stage, pp) == rank]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(
        "all forwards, then all backwards: every microbatch is live",
        gpipe,
    ),
    "1f1b": Schedule(
        "one forward, one backward; interleaved when vpp is above 1",
        one_f_one_b,
    ),
    "interleaved": Schedule(
        "1f1b over several stages per rank: vpp times less bubble",
        interleaved_1f1b,
        least_vpp=2,
    ),
    "zb_h1": Schedule(
        "1f1b with deferred weight gradients: a third of its bubble, the same memory",
        zero_bubble_h1,
    ),
    "zb_v": Schedule(
        "stages in a V, weight gradients fill all gaps, the memory of 1f1b",
        zero_bubble_v,
        least_vpp=2,
        most_vpp=2,
        rank_of=v_shape_rank,
    ),
    "dualpipe_v": Schedule(
        "stages in a V, forwards paired with backwards",
        dualpipe_v,
        least_vpp=2,
        most_vpp=2,
        rank_of=v_shape_rank,
    ),
}


def build_program(name: str, pp: int, vpp: int, microbatches: int) -> Program:
    """The program of a schedule of the catalog; ScheduleError where this vpp is not legal for it."""
    schedule = SCHEDULES[name]
    if not schedule.accepts_vpp(vpp):
        expected = f"expected vpp {schedule.legal_vpp}"
        raise ScheduleError(f"schedule {name} with vpp = {vpp}: {expected}; change vpp or the schedule")
    return schedule.generate(pp, microbatches, vpp)
