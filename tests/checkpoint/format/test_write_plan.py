"""The write plan: every element once, by a rank that holds it, evenly."""

from __future__ import annotations

import pytest

from moefold.checkpoint.format.boxes import whole_box
from moefold.checkpoint.format.ledger import TensorSpec
from moefold.checkpoint.format.write_plan import assign_writers

SPEC = TensorSpec("float32", (4, 8), stacked=False)
ROWS = [((start, 1), (0, 8)) for start in range(4)]


def test_replicas_share_the_writing():
    everything = {f"t{n}": (SPEC, [whole_box(SPEC.shape)]) for n in range(8)}
    plan = assign_writers([everything] * 4)
    assert [len(mine.chunks) for mine in plan.plans_of_ranks(4)] == [2, 2, 2, 2]


def test_boxes_that_one_rank_holds_are_written_by_it():
    plan = assign_writers([{"t": (SPEC, [ROWS[rank]])} for rank in range(4)])
    for rank, mine in enumerate(plan.plans_of_ranks(4)):
        assert mine.chunks == [("t", ROWS[rank])]
        assert mine.specs == {"t": SPEC}


def test_wide_elements_come_first_in_a_file():
    wide = TensorSpec("float64", (2,), stacked=False)
    holdings = {"narrow": (SPEC, [whole_box(SPEC.shape)]), "wide": (wide, [whole_box(wide.shape)])}
    plan = assign_writers([holdings])
    assert [name for name, _ in plan.plans_of_ranks(1)[0].chunks] == ["wide", "narrow"]


def test_missing_values_and_different_specs_are_errors():
    with pytest.raises(ValueError, match='ranks hold 24 of 32 values of "t"'):
        assign_writers([{"t": (SPEC, ROWS[:3])}])
    other = SPEC._replace(dtype="float64")
    with pytest.raises(ValueError, match=r'"t" is float32 \[4, 8\] on rank 0 and float64 \[4, 8\] on another'):
        assign_writers([{"t": (SPEC, ROWS)}, {"t": (other, ROWS)}])
