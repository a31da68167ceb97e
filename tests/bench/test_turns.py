"""`moefold bench turns`: the report, what counts as faster, and refusals."""

from __future__ import annotations

import json
import time

import pytest

from moefold.bench.turns import WARM_UP_STEPS, StepCost, median_cost, times_faster, warm_contenders
from moefold.cli.bench import run_command
from moefold.config.errors import UserError


def test_steps_with_and_without_a_tape_are_timed_beside_all_of_transformers(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    options = ["--json", "--turns", "1", "--steps", "1", "--threads", "1", "--model", "mixtral-8x22b-tiny"]
    assert run_command(["turns", *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert list(row["costs"]) == ["moefold", "tape", "two processes", "eager", "batched_mm", "grouped_mm"]
    assert all(cost["wall_ms"] > 0 and cost["cpu_ms"] > 0 for cost in row["costs"].values())
    assert set(row["times"]) == {"moefold", "tape", "two processes"}
    assert row["threads"] == 1


def test_the_fastest_of_transformers_counts_for_each_clock_by_itself():
    costs = {"tape": StepCost(2.0, 4.0, 0), "eager": StepCost(3.0, 9.0, 7), "grouped_mm": StepCost(5.0, 8.0, 7)}
    assert times_faster(costs) == {"tape": (1.5, 2.0)}
    assert times_faster({"tape": costs["tape"]}) == {}


def test_a_contender_with_a_first_step_far_longer_than_the_fastest_leaves_after_it():
    steps: list[str] = []

    def contender(name: str, milliseconds: float):
        def take_step() -> None:
            steps.append(name)
            end = time.process_time() + milliseconds / 1e3
            while time.process_time() < end:
                pass

        return take_step

    contenders = {"plain": contender("plain", 4), "slow": contender("slow", 80), "near": contender("near", 8)}
    assert list(warm_contenders(contenders)) == ["plain", "near"]
    assert steps.count("slow") == 1
    assert steps.count("near") == WARM_UP_STEPS


def test_the_median_of_each_figure_counts():
    costs = [StepCost(1.0, 6.0, 2), StepCost(9.0, 5.0, 3), StepCost(2.0, 4.0, 1)]
    assert median_cost(costs) == StepCost(2.0, 5.0, 2)


def test_unknown_models_and_no_turns_are_refused():
    with pytest.raises(UserError, match="--turns 0 is not legal"):
        run_command(["turns", "--turns", "0"])
    with pytest.raises(UserError, match="--threads -1 is not legal"):
        run_command(["turns", "--threads", "-1"])
    with pytest.raises(UserError, match="olmoe-1b-7b-tiny"):
        run_command(["turns", "--model", "olmoe-tiny"])
