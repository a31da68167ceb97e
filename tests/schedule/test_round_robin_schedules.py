"""Closed forms of every schedule, for any number of ranks, chunks and microbatches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.schedule.program import program_problems
from moefold.schedule.round_robin_schedules import microbatch_groups
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.simulate_program import Timeline, simulate_program
from moefold.schedule.stage_costs import uniform_costs

RANKS, CHUNKS = (1, 2, 3, 4, 8), (2, 3, 4)


def clocked(name: str, pp: int, microbatches: int, vpp: int = 1) -> Timeline:
    return simulate_program(build_program(name, pp, vpp, microbatches), uniform_costs(pp * vpp, vpp))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 7), st.integers(1, 4), st.integers(1, 23))
def test_no_schedule_ever_deadlocks_or_drops_an_op(name: str, pp: int, vpp: int, microbatches: int):
    if SCHEDULES[name].accepts_vpp(vpp):
        assert program_problems(build_program(name, pp, vpp, microbatches), pp * vpp, microbatches) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("m", [1, 3, 8, 17])
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_steps(name: str, p: int, m: int):
    found = clocked(name, p, m)
    assert found.makespan == pytest.approx((m + p - 1) * 3, rel=1e-12)
    assert found.bubble == pytest.approx([(p - 1) / (m + p - 1)] * p, abs=1e-12)
    assert found.live == ([m] * p if name == "gpipe" else [min(m, p - r) for r in range(p)])


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", CHUNKS)
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, v: int, rounds: int):
    found = clocked("interleaved", p, rounds * p, v)
    assert found.makespan == pytest.approx((rounds * p + (p - 1) / v) * 3, rel=1e-12)
    if rounds > 1:
        assert found.live == [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", CHUNKS)
def test_interleaving_keeps_its_closed_form_for_any_number_of_microbatches_from_p_on(p: int, v: int):
    for m in {p, p + 1, 2 * p - 1, 2 * p + 1, 3 * p + 2}:
        assert clocked("interleaved", p, m, v).makespan == pytest.approx((m + (p - 1) / v) * 3, rel=1e-12), m


def test_live_chunks_of_the_published_example():
    """DeepSeek-V3 at PP4 x VPP4: 19, 17, 15, 13."""
    assert clocked("1f1b", 4, 16, 4).live == [19, 17, 15, 13]


@pytest.mark.parametrize("p", RANKS)
def test_h1_takes_3m_plus_p_minus_1_and_holds_no_more_than_1f1b_does_somewhere(p: int):
    for m in (p, 2 * p + 1, 4 * p):
        found = clocked("zb_h1", p, m)
        assert found.makespan == pytest.approx(3 * m + p - 1, rel=1e-12)
        assert max(found.live) == max(clocked("1f1b", p, m).live)
        for v in CHUNKS:
            assert clocked("zb_h1", p, m, v).makespan == pytest.approx(3 * m + (p - 1) / v, rel=1e-12)


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_idles_p_minus_1_stages_at_the_memory_of_1f1b(p: int):
    for m in (2 * p - 1, 2 * p, 3 * p + 1, 6 * p):
        found = clocked("zb_v", p, m, 2)
        assert found.makespan == pytest.approx(3 * m + (p - 1) / 2, rel=1e-12)
        assert max(found.live) <= 2 * p, "two chunks are what 1F1B calls one"


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v_idles_twice_that_and_holds_one_chunk_more(p: int):
    for m in (2 * p, 2 * p + 1, 6 * p):
        found = clocked("dualpipe_v", p, m, 2)
        assert found.makespan == pytest.approx(3 * m + (p - 1), rel=1e-12)
        assert found.live == [2 * p + 1] * p if m > 2 * p else max(found.live) <= 2 * p + 1


def test_dualpipe_v_pairs_most_forwards_with_backwards():
    program = build_program("dualpipe_v", 4, 2, 32)
    paired = [sum({"F", "D"} <= {op.kind for op in slot} for slot in slots) for slots in program]
    assert min(paired) >= 2 * (32 - 2 * 4), paired


@given(st.integers(1, 20), st.integers(1, 100))
def test_groups_are_p_or_more_even_to_one_and_the_larger_come_first(ranks: int, microbatches: int):
    found = microbatch_groups(ranks, microbatches)
    sizes = [len(group) for group in found]
    assert [m for group in found for m in group] == list(range(microbatches))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[-1] >= min(ranks, microbatches)
    assert sizes[0] < 2 * ranks


@pytest.mark.parametrize(
    ("name", "vpp", "legal"), [("zb_v", 1, "2"), ("zb_v", 3, "2"), ("interleaved", 1, "2 or more")]
)
def test_a_vpp_the_schedule_does_not_take_is_told_with_those_it_does(name: str, vpp: int, legal: str):
    with pytest.raises(ScheduleError, match=f"schedule {name} with vpp = {vpp}: expected vpp {legal};"):
        build_program(name, 4, vpp, 8)
