"""The planner's time and memory of runs with dynamic context parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from moefold.plan.answer import answer_request
from moefold.plan.length_histogram import parse_lengths
from moefold.plan.memory.context_rows import settings_of_rows
from moefold.plan.memory.explain_memory import explain_memory
from moefold.plan.memory.peak_memory import fullest_rank, memory_by_rank
from moefold.plan.memory.run_setting import RunSetting, build_run_setting
from moefold.plan.request import read_request
from moefold.plan.time.dynamic_step import DynamicContext, draw_lengths, dynamic_context, time_step

LONG_TAIL = "700:0.3,2000:0.4,5000:0.2,20000:0.09,131072:0.01"
ASKED = {
    "model": "qwen3-30b-a3b", "gpu": "h100", "gpus": 64, "seq": 131072, "gbs": 32, "mbs": 1,
    "parallel.ep": 8, "parallel.cp": 16, "parallel.pp": 1, "parallel.tp": 1, "parallel.dispatcher": "all_to_all",
    "data.attend": "document", "data.packing": "best_fit", "parallel.context_sizes": "dynamic",
}  # fmt: skip
FIXED = {"parallel.context_sizes": "fixed"}


def setting(**changes: Any) -> RunSetting:
    r = read_request({**ASKED, **changes})
    return build_run_setting(r.config, r.gpus, r.choices)


def groups(**changes: Any) -> DynamicContext | None:
    return dynamic_context(setting(**changes), read_request({**ASKED, **changes}).gpu)


def seconds(**changes: Any) -> float:
    return time_step(setting(**changes), read_request({**ASKED, **changes}).gpu).seconds


def most(s: RunSetting) -> float:
    return fullest_rank(memory_by_rank(s)).total


def test_lengths_with_a_long_tail_take_less_time_with_sizes_of_their_own():
    assert seconds(lengths=LONG_TAIL) < 0.97 * seconds(lengths=LONG_TAIL, **FIXED)


def test_short_samples_stay_on_one_rank_and_whole_sequences_on_those_that_hold_them():
    short = groups(lengths="4000:1")
    assert short is not None
    assert list(short.shares) == [1]
    whole = groups()
    assert whole is not None
    assert min(whole.shares) >= 16
    assert groups(**FIXED) is None


def test_a_run_groups_by_what_the_planner_takes_for_sending_unless_it_is_told():
    """Groups over nodes, whose keys attention does not hide, are fewer than by FLOPs alone."""
    hidden, predicted = (groups(lengths=LONG_TAIL, **{"parallel.context_sending": keys}) for keys in (("0",), ()))
    assert hidden is not None
    assert predicted is not None
    far = [sum(share for size, share in each.shares.items() if size > 8) for each in (hidden, predicted)]
    assert far[1] < far[0]


def test_whole_sequences_take_about_as_long_as_with_fixed_sizes():
    assert seconds() == pytest.approx(seconds(**FIXED), rel=0.15)


def test_walls_add_up_to_the_step():
    step = time_step(setting(lengths=LONG_TAIL), read_request(ASKED).gpu)
    assert sum(step.walls.values()) == pytest.approx(step.seconds)
    assert all(wall >= 0 for wall in step.walls.values())


@pytest.mark.parametrize("context", ["ring", "all_gather"])
def test_memory_is_that_of_the_rows_that_need_most(context: str):
    """With gathered keys those of the largest group, which a sequence of fixed sizes need not have."""
    s = setting(**{"parallel.context": context})
    rows = settings_of_rows(s)
    assert [each.parallel.cp for each in rows] == [1, 2, 4, 8, 16, 32, 64]
    assert {each.data.seq_len // each.parallel.cp for each in rows} == {8192}
    by_size = [most(each) for each in rows]
    assert most(s) == max(by_size)
    if context == "all_gather":
        assert most(s) == by_size[-1] > by_size[4]
        assert most(s) > most(setting(**FIXED, **{"parallel.context": context}))


def test_groups_of_all_sizes_have_buffers_outside_torch():
    assert setting().outside > setting(**FIXED).outside


def test_a_longer_batch_takes_longer_in_proportion():
    half, whole = (seconds(lengths="4000:1", gbs=gbs) for gbs in (256, 512))
    assert whole / half == pytest.approx(2, rel=0.1)


def test_a_schedule_with_less_bubble_takes_less_time():
    plain, deferred = (
        seconds(lengths="4000:1", **{"parallel.pp": 4, "parallel.cp": 8, "pipeline.schedule": name})
        for name in ("1f1b", "zb_h1")
    )
    assert deferred < plain


def test_drawn_lengths_are_those_of_the_histogram_within_the_batch():
    samples = parse_lengths(("100:0.5", "900:0.5"))
    assert set(draw_lengths(samples, 10_000, 10_000)) == {100, 900}
    assert sum(draw_lengths(samples, 10_000, 10_000)) <= 10_000
    assert len(draw_lengths(samples, 10_000_000, 1000)) == 1024


def test_answer_and_arithmetic_tell_groups_and_rows():
    answer = answer_request({**ASKED, "lengths": LONG_TAIL, "explain": True})
    assert answer["dynamic_context"].startswith("dynamic context: about ")
    assert answer["dynamic_context"] in answer["explained"]
    s = setting()
    assert any("need most of all sizes" in line for line in explain_memory(s.config, 64, s.choices))
    assert answer_request({**ASKED, **FIXED})["dynamic_context"] is None
