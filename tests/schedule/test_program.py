"""Programs: causality, deadlock, and everything that keeps one from being a whole training step."""

import pytest

from moefold.schedule.program import (
    PipelineOp,
    Program,
    Slot,
    check_program,
    op_dependencies,
    program_problems,
    rank_by_stage,
    walk_program,
)
from moefold.schedule.round_robin_schedules import one_f_one_b
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.schedule_error import ScheduleError


def test_needs_is_the_chain_of_a_microbatch_down_and_back_up():
    assert op_dependencies(PipelineOp("F", 0, 3), 2) == []
    assert op_dependencies(PipelineOp("F", 2, 3), 2) == [PipelineOp("F", 1, 3)]
    assert op_dependencies(PipelineOp("D", 2, 3), 2) == [PipelineOp("F", 2, 3)]
    assert op_dependencies(PipelineOp("D", 1, 3), 2) == [PipelineOp("F", 1, 3), PipelineOp("D", 2, 3)]
    assert op_dependencies(PipelineOp("W", 1, 3), 2) == [PipelineOp("D", 1, 3)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_walk_visits_every_slot_once_in_each_ranks_order_and_after_what_it_needs(name: str):
    program = build_program(name, 3, SCHEDULES[name].least_vpp, 5)
    last = max(op.stage for slots in program for slot in slots for op in slot)
    visited: Program = [[] for _ in program]
    done: set[PipelineOp] = set()

    def finish(rank: int, slot: Slot) -> None:
        assert all(need in done or need in slot for op in slot for need in op_dependencies(op, last))
        visited[rank].append(slot)
        done.update(slot)

    walk_program(program, finish)
    assert visited == program


def test_a_deadlock_names_who_waits_where_and_for_whom():
    program = one_f_one_b(2, 2)
    program[0].reverse()
    with pytest.raises(ScheduleError) as told:
        walk_program(program, lambda rank, slot: None)
    first, second = told.value.problems
    assert "rank 0 waits at D0.1+W0.1 for F0.1, which rank 0 only runs later and D1.1, which rank 1" in first
    assert "rank 1 waits at F1.0 for F0.0, which rank 0 only runs later" in second


def test_what_nobody_runs_is_told_as_such():
    with pytest.raises(ScheduleError, match=r"rank 0 waits at F1\.0 for F0\.0, which no rank runs"):
        walk_program([[(PipelineOp("F", 1, 0),)]], lambda rank, slot: None)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 3), (4, 2), (4, 9)])
def test_every_schedule_is_a_whole_step_with_stages_where_its_catalog_entry_says(name: str, pp: int, microbatches: int):
    schedule = SCHEDULES[name]
    for vpp in filter(schedule.accepts_vpp, (1, 2, 3)):
        program = check_program(build_program(name, pp, vpp, microbatches), pp * vpp, microbatches)
        assert rank_by_stage(program) == [schedule.rank_of(stage, pp) for stage in range(pp * vpp)]
        for rank in range(pp):
            assert schedule.stages_on_rank(rank, pp, vpp) == [
                s for s, home in enumerate(rank_by_stage(program)) if home == rank
            ]


def test_a_dropped_op_is_named_with_its_rank():
    program = one_f_one_b(3, 2)
    program[2] = [tuple(op for op in slot if op != PipelineOp("W", 2, 1)) for slot in program[2]]
    (problem,) = program_problems(program)
    assert problem.startswith("rank 2 drops W2.1; expected F, D and W of every microbatch 0 to 1")


def test_a_repeated_op_is_named_with_every_rank_that_runs_it():
    program = one_f_one_b(2, 2)
    program[1].append((PipelineOp("W", 1, 0),))
    assert program_problems(program) == ["W1.0 runs 2 times, on rank 1, 1; expected once: keep one"]


def test_a_stage_on_two_ranks_is_named():
    program = one_f_one_b(2, 2)
    program[0].append(program[1].pop())
    assert any("stage 1 runs on ranks 0, 1; expected one" in problem for problem in program_problems(program))


def test_ops_of_one_slot_must_be_independent_but_for_a_weight_gradient_behind_its_data_gradient():
    f, d, w = PipelineOp("F", 0, 0), PipelineOp("D", 0, 0), PipelineOp("W", 0, 0)
    assert program_problems([[(f,), (d, w)]]) == []
    assert "D0.0 needs F0.0 finished" in program_problems([[(f, d, w)]])[0]
    assert "W0.0 needs D0.0 finished" in program_problems([[(f,), (w, d)]])[0]


def test_numbers_of_stages_and_microbatches_are_held_against_the_program():
    program = one_f_one_b(2, 2)
    assert "no rank runs stage 2 of 3" in program_problems(program, stages=3)[0]
    assert "drops F0.2" in program_problems(program, microbatches=3)[0]
    assert "rank 0 runs F0.1, but there are 2 stages and 1 microbatches" in program_problems(program, microbatches=1)[0]
    assert "has no op" in program_problems([[], []])[0]


def test_many_problems_of_a_kind_are_cut_short():
    told = program_problems([one_f_one_b(1, 1)[0], []], stages=1, microbatches=100)
    assert len(told) == 5
    assert told[-1] == "... and 293 more of that kind"
