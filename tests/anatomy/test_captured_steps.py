"""Static steps of one layer that follow each other are captured as one."""

from __future__ import annotations

from moefold.anatomy.captured_steps import captured_runs
from moefold.anatomy.step_specs import StepSpec


def spec(name: str, *needs: str) -> StepSpec:
    return StepSpec(name, "compute", True, "", needs=needs)


def test_neighbours_are_captured_as_one_unless_another_step_lies_between_or_is_needed():
    moe = [spec("attend"), spec("route"), spec("plan"), spec("dispatch"), spec("shared", "route"), spec("experts")]
    assert captured_runs(moe) == ["attend+route", "shared"]
    dense = [spec("attend"), spec("mlp")]
    assert captured_runs(dense) == ["attend+mlp"]
    assert captured_runs([spec("route"), spec("shared", "attend")]) == ["route", "shared"]
