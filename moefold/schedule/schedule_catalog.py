"""Every schedule by name: what it is good for, which vpp it takes, where its stages lie. The command, the rules of a
configuration and the trainer read this one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.schedule import round_robin_schedules, v_schedules
from moefold.schedule.program import Program
from moefold.schedule.schedule_error import ScheduleError


def round_robin_rank(stage: int, ranks: int) -> int:
    return stage % ranks


def v_shape_rank(stage: int, ranks: int) -> int:
    return stage if stage < ranks else 2 * ranks - 1 - stage


@dataclass(frozen=True)
class Schedule:
    """A named way to order microbatches. `rank_of(stage, pp)` is the rank that holds a stage."""

    says: str
    generate: Callable[[int, int, int], Program]
    least_vpp: int = 1
    most_vpp: int | None = None
    rank_of: Callable[[int, int], int] = round_robin_rank

    def accepts_vpp(self, vpp: int) -> bool:
        return self.least_vpp <= vpp and (self.most_vpp is None or vpp <= self.most_vpp)

    @property
    def legal_vpp(self) -> str:
        """The legal vpp in words: `1 or more`, `2`."""
        return f"{self.least_vpp} or more" if self.most_vpp is None else f"{self.least_vpp}"

    def stages_on_rank(self, rank: int, pp: int, vpp: int) -> list[int]:
        """The stages a rank holds, in the order of the model."""
        return [stage for stage in range(pp * vpp) if self.rank_of(stage, pp) == rank]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("all forwards, then all backwards: every microbatch is live", round_robin_schedules.gpipe),
    "1f1b": Schedule("one forward, one backward; interleaved when vpp is above 1", round_robin_schedules.one_f_one_b),
    "interleaved": Schedule(
        "1f1b over several stages a rank: vpp times less bubble", round_robin_schedules.interleaved_1f1b, 2
    ),
    "zb_h1": Schedule(
        "1f1b with deferred weight gradients: a third of its bubble, its memory", round_robin_schedules.zero_bubble_h1
    ),
    "zb_v": Schedule(
        "stages in a V, weight gradients fill all gaps, 1f1b's memory", v_schedules.zero_bubble_v, 2, 2, v_shape_rank
    ),
    "dualpipe_v": Schedule("stages in a V, forwards paired with backwards", v_schedules.dualpipe_v, 2, 2, v_shape_rank),
}


def build_program(name: str, pp: int, vpp: int, microbatches: int) -> Program:
    """The program of a schedule from the catalog; Unsound where the schedule does not take this vpp."""
    schedule = SCHEDULES[name]
    if not schedule.accepts_vpp(vpp):
        raise ScheduleError(
            f"schedule {name} with vpp = {vpp}: expected vpp {schedule.legal_vpp}; change vpp or the schedule"
        )
    return schedule.generate(pp, microbatches, vpp)
