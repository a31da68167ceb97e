"""What follows from a parameter's shape: the matrix that an optimizer may see."""

from __future__ import annotations

import pytest

from moefold.layout.declare import Declaration, MatrixCut
from moefold.layout.placement import REPLICATED, sharded_over_experts, sharded_over_tp

CASES = {
    "a linear layer": (Declaration((24, 16), REPLICATED, 0.02), (24, 16)),
    "the query projection: heads by width": (Declaration((4, 8, 16), sharded_over_tp(0), 0.02), (32, 16)),
    "gate and up of each expert": (
        Declaration((6, 2, 10, 16), sharded_over_experts(2), 0.02, stacked=True, rows="gate_up"),
        (10, 16),
    ),
    "gate and up of a dense layer": (Declaration((2, 10, 16), sharded_over_tp(1), 0.02, rows="gate_up"), (10, 16)),
    "down of each expert": (Declaration((6, 16, 10), sharded_over_experts(2), 0.02, stacked=True), (16, 10)),
    "a norm": (Declaration((16,), REPLICATED, None), None),
    "the bias of heads": (Declaration((4, 8), sharded_over_tp(0), 0.0), None),
    "biases of experts": (Declaration((6, 2, 10), sharded_over_experts(2), 0.0), None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_matrix_follows_from_the_shape(case: str):
    declaration, matrix = CASES[case]
    assert declaration.matrix == matrix


def test_a_rank_holds_a_part_of_the_matrix():
    query = Declaration((4, 8, 16), sharded_over_tp(0), 0.02)
    assert query.matrix_within((2, 8, 16)) == (16, 16)
    down = Declaration((6, 16, 10), sharded_over_experts(2), 0.02, stacked=True)
    assert down.matrix_within((3, 16, 5)) == (16, 5)


CUTS = {
    "rows of a projection to heads": (
        Declaration((4, 8, 16), sharded_over_tp(0), 0.02, rows="heads"),
        MatrixCut("tp", 0),
    ),
    "columns": (Declaration((16, 24), sharded_over_tp(1), 0.02), MatrixCut("tp", 1)),
    "rows of gate and of up": (Declaration((2, 10, 16), sharded_over_tp(1), 0.02, rows="gate_up"), MatrixCut("tp", 0)),
    "rows of each expert's gate and up": (
        Declaration((6, 2, 10, 16), sharded_over_experts(2), 0.02, stacked=True, rows="gate_up"),
        MatrixCut("etp", 0),
    ),
    "columns of each expert": (
        Declaration((6, 16, 10), sharded_over_experts(2), 0.02, stacked=True),
        MatrixCut("etp", 1),
    ),
    "nowhere": (Declaration((24, 16), REPLICATED, 0.02), None),
}


@pytest.mark.parametrize("case", CUTS)
def test_the_cut_of_a_matrix_follows_from_the_placement(case: str):
    declaration, cut = CUTS[case]
    assert declaration.matrix_cut == cut
