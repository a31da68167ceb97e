"""Passes keep the work and change the order: what they promise, over random programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.schedule.passes import defer_weight_grads, pair_alike, pair_forward_with_backward
from moefold.schedule.program import Program, is_paired, ops_with_ranks, program_problems
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.simulate_program import simulate_program
from moefold.schedule.stage_costs import uniform_costs


def order_of(program: Program, kinds: str) -> list[list[str]]:
    return [
        [str(op) for at, op in ops_with_ranks(program) if at == rank and op.kind in kinds]
        for rank in range(len(program))
    ]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 12))
def test_passes_keep_programs_whole_and_the_order_of_forwards_and_of_backwards(name: str, pp: int, vpp: int, m: int):
    if not SCHEDULES[name].accepts_vpp(vpp):
        return
    program = build_program(name, pp, vpp, m)
    paired = pair_forward_with_backward(program)
    for each in (paired, defer_weight_grads(program), defer_weight_grads(paired)):
        assert program_problems(each, pp * vpp, m) == []
        assert order_of(each, "F") == order_of(program, "F")
        assert order_of(each, "D") == order_of(program, "D")


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_microbatches_in_step_share_every_slot(name: str, pp: int, vpp: int, m: int, defer: bool):
    if not SCHEDULES[name].accepts_vpp(vpp):
        return
    program = build_program(name, pp, vpp, m)
    in_step = pair_alike(defer_weight_grads(program) if defer else program)
    assert program_problems(in_step, pp * vpp, m) == []
    last = m - 1 if m % 2 else None  # alone
    for slots in in_step:
        for slot in slots:
            for kind, stage, microbatch in slot:
                partner = (kind, stage, microbatch ^ 1)
                assert microbatch == last or partner in slot


@pytest.mark.parametrize(("name", "p", "v"), [("1f1b", 4, 1), ("1f1b", 1, 1), ("zb_h1", 4, 1), ("interleaved", 2, 3)])
def test_microbatches_in_step_take_the_time_of_half_as_many_and_of_the_busier_lane(name: str, p: int, v: int):
    half = simulate_program(build_program(name, p, v, 4 * p), uniform_costs(p * v, v))
    for comm in (0.5, 1.0):  # as long as its compute at most
        costs = uniform_costs(p * v, v, comm)
        in_step = simulate_program(pair_alike(build_program(name, p, v, 8 * p)), costs)
        assert in_step.makespan == pytest.approx(2 * half.makespan), "nothing of the communication is left"
        assert in_step.exposed == pytest.approx([0.0] * p)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_pairing_keeps_one_more_chunk_live_than_interleaved_1f1b(p: int, v: int):
    program = pair_forward_with_backward(build_program("1f1b", p, v, 8 * p))
    found = simulate_program(program, uniform_costs(p * v, v))
    assert found.live == [2 * (p - r - 1) + (v - 1) * p + 2 for r in range(p)]


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_in_the_steady_state_every_forward_is_paired(p: int, v: int):
    for rank, slots in enumerate(pair_forward_with_backward(build_program("1f1b", p, v, 8 * p))):
        lead = 2 * (p - rank - 1) + (v - 1) * p + 1
        assert [is_paired(slot) for slot in slots] == [False] * lead + [True] * (8 * p * v - lead) + [False] * lead


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (16, 64)])
def test_pairing_hides_communication_and_deferring_weight_gradients_adds_to_it(p: int, m: int):
    costs = uniform_costs(p, comm=0.5)
    program = build_program("1f1b", p, 1, m)
    paired = pair_forward_with_backward(program)
    exposed = simulate_program(program, costs)
    hidden = simulate_program(paired, costs)
    both = simulate_program(defer_weight_grads(paired), costs)
    assert exposed.makespan > hidden.makespan > both.makespan
    assert exposed.exposed == pytest.approx([m * 1.0] * p)
    assert hidden.exposed == pytest.approx([2 * 0.5 * (2 * (p - r - 1) + 1) for r in range(p)]), "only at both ends"


@pytest.mark.parametrize("in_step", [False, True])
def test_deferring_holds_back_as_many_weight_gradients_as_the_rank_has_before_it(in_step: bool):
    program = build_program("1f1b", 4, 1, 12)
    if in_step:
        program = pair_alike(program)
    for rank, slots in enumerate(defer_weight_grads(program)):
        behind, most = 0, 0
        for slot in slots:
            behind += sum((op.kind == "D") - (op.kind == "W") for op in slot)
            most = max(most, behind)
        assert most == rank + (2 if in_step else 1), "and those of the slot itself"


def test_deferring_never_lengthens_a_uniform_1f1b():
    for p, v, m in [(2, 1, 1), (4, 1, 2), (4, 2, 5), (3, 3, 7)]:
        program, costs = build_program("1f1b", p, v, m), uniform_costs(p * v, v)
        assert (
            simulate_program(defer_weight_grads(program), costs).makespan
            <= simulate_program(program, costs).makespan + 1e-9
        )
