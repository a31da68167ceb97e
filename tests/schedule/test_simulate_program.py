"""The clock: uneven stages, messages, communication inside ops, bytes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.schedule.passes import defer_weight_grads, pair_forward_with_backward
from moefold.schedule.program import PipelineOp, is_paired, op_dependencies
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.simulate_program import lane_intervals, simulate_program, slot_duration
from moefold.schedule.stage_costs import StageCosts, uniform_costs

F, D, W = PipelineOp("F", 0, 1), PipelineOp("D", 0, 0), PipelineOp("W", 0, 0)


def costs_of(compute: tuple[float, float, float], comm: tuple[float, float]) -> StageCosts:
    each = {kind: [seconds] for kind, seconds in zip("FDW", compute, strict=True)}
    return StageCosts(each, {"F": [comm[0]], "D": [comm[1]], "W": [0.0]}, 0.0, [0.0], [0.0])


@pytest.mark.parametrize(
    ("compute", "comm", "alone", "paired"),
    [
        ((1, 1, 1), (0, 0), 3, 3),
        ((1, 1, 1), (0.5, 0.5), 4, 3),
        ((1, 1, 1), (2, 2), 7, 4),  # the wire is the busier lane
        ((1, 1, 1), (3, 0), 6, 4),  # the forward alone takes longer than anything else
    ],
)
def test_a_pair_takes_as_long_as_its_busier_lane_or_its_longer_op(
    compute: tuple[float, float, float], comm: tuple[float, float], alone: float, paired: float
):
    costs = costs_of(compute, comm)
    assert slot_duration((F,), costs) + slot_duration((D, W), costs) == alone
    assert slot_duration((F, D, W), costs) == paired
    rough = replace(costs, friction=0.25)
    assert slot_duration((F, D, W), rough) == pytest.approx(paired + 0.25 * (alone - paired))
    assert slot_duration((F,), rough) == slot_duration((F,), costs)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0, 2),
    st.floats(0, 1),
    st.data(),
)
def test_on_the_clock_nothing_starts_before_what_it_needs_and_no_rank_does_two_things_at_once(
    name: str, pp: int, m: int, comm: float, send: float, data: st.DataObject
):
    vpp = SCHEDULES[name].least_vpp
    number = st.floats(0.1, 3)
    lists = {kind: data.draw(st.lists(number, min_size=pp * vpp, max_size=pp * vpp)) for kind in "FDW"}
    costs = replace(uniform_costs(pp * vpp, vpp, comm), compute=lists, send=send)
    rewrite = data.draw(st.sampled_from([list, pair_forward_with_backward, defer_weight_grads]))
    found = simulate_program(rewrite(build_program(name, pp, vpp, m)), costs)
    begin = {op: (span.start, span.rank) for span in found.spans for op in span.slot}
    end = {op: (span.end, span.rank) for span in found.spans for op in span.slot}
    for op, (start, rank) in begin.items():
        for need in op_dependencies(op, pp * vpp - 1):
            if begin[need] != begin[op]:  # else D and W of one slot
                finished, home = end[need]
                assert finished + (send if home != rank else 0) <= start + 1e-9
    for rank in range(pp):
        mine = [span for span in found.spans if span.rank == rank]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
        idle = found.makespan - sum(span.end - span.start for span in mine)
        assert found.bubble[rank] == pytest.approx(idle / found.makespan, abs=1e-9)
    for span in found.spans:
        for lane in ("compute", "comm"):
            inside = sorted((part.start, part.end) for part in lane_intervals(span, costs) if part.lane == lane)
            assert all(span.start <= a <= b <= span.end + 1e-9 for a, b in inside)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(inside))


def test_a_slower_stage_sets_the_pace_of_the_whole_pipe():
    costs = replace(uniform_costs(4), compute={kind: [1, 1, 2, 1] for kind in "FDW"})
    found = simulate_program(build_program("1f1b", 4, 1, 16), costs)
    assert found.bubble[2] < min(found.bubble[r] for r in (0, 1, 3))
    ahead, work, wait, behind = 1 + 1, 16 * 3 * 2, 1, 2 + 2  # it waits once, for the first backward from below
    assert found.makespan == pytest.approx(ahead + work + wait + behind)


def test_messages_lengthen_the_way_down_and_back_up_but_not_on_one_rank():
    plain, slow = uniform_costs(4), replace(uniform_costs(4), send=0.25)
    program = build_program("1f1b", 4, 1, 1)
    assert simulate_program(program, slow).makespan - simulate_program(program, plain).makespan == pytest.approx(
        6 * 0.25
    )
    same = build_program("1f1b", 1, 4, 1)
    assert simulate_program(same, slow).makespan == simulate_program(same, plain).makespan


def test_bytes_follow_the_stage_and_weight_gradients_hold_their_part():
    costs = replace(uniform_costs(2), saved=[10.0, 20.0], held=[4.0, 8.0])
    assert simulate_program(build_program("1f1b", 2, 1, 4), costs).bytes == [20.0, 20.0]
    assert simulate_program(build_program("gpipe", 2, 1, 4), costs).bytes == [40.0, 80.0]
    assert simulate_program(build_program("zb_h1", 2, 1, 4), costs).bytes == [20.0, 28.0], "one waits with its 8"


def test_the_spans_of_a_rank_are_its_program():
    program = pair_forward_with_backward(build_program("1f1b", 4, 2, 8))
    found = simulate_program(program, uniform_costs(8, 2, comm=0.4))
    for rank, slots in enumerate(program):
        assert [span.slot for span in found.spans if span.rank == rank] == slots
    assert any(is_paired(span.slot) for span in found.spans)


def test_free_work_takes_no_time():
    nothing = replace(uniform_costs(2), compute={kind: [0.0, 0.0] for kind in "FDW"})
    found = simulate_program(build_program("1f1b", 2, 1, 2), nothing)
    assert (found.makespan, found.bubble) == (0, [0, 0])
