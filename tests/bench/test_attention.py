"""`moefold bench attention` times the cases asked for, and counts the products of pairs that a query sees."""

import json

import pytest

from moefold.bench.attention import causal_flops
from moefold.cli.main import run_command_line
from moefold.kernels.attention.timings import TIMED_TOKENS
from moefold.kernels.facts import AttentionShape


def test_causal_flops_are_those_of_seven_products_over_the_pairs_below_the_diagonal():
    shape = AttentionShape(1024, heads=3, kv_heads=1, head_dim=24, value_dim=16)
    pairs = TIMED_TOKENS / 1024 * (1024 * 1025 / 2)
    forward = 2 * pairs * 3 * (24 + 16)
    backward = 2 * pairs * 3 * (24 + 16 + 16 + 24 + 24)
    assert causal_flops(shape) == pytest.approx(forward + backward, rel=1e-3)


def test_the_report_has_the_cases_asked_for(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "attention", "--device", "cpu", "--case", "played_rings", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["results"] == []
    assert {row["ring"] for row in report["played_rings"]} == {"whole", "2 ranks", "4 ranks"}


def test_a_case_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "attention", "--device", "cpu", "--case", "ring"]) == 2
    assert "played_rings" in capsys.readouterr().err
