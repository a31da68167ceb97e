"""What the planner says of runs on one GPU, against whole steps of the trainer there (`moefold bench plan`)."""

from __future__ import annotations

import pytest
import torch

from moefold.bench.machine import free_device_memory
from moefold.bench.plan import PLAN_CASES, plan_case_config, planned_figures
from moefold.bench.step import time_moefold_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.alone
@pytest.mark.parametrize("name", PLAN_CASES)
def test_peak_memory_is_within_five_percent_and_time_within_fifteen(name: str):
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the planner's figures of an H200 are compared")
    case = PLAN_CASES[name]
    values = case.overrides()
    said = planned_figures(case.model, values, "h200")
    free_device_memory("cuda")
    took = time_moefold_steps(plan_case_config(case.model, values), 5, None)
    assert said["peak_gib"] == pytest.approx(took.peak_gib, rel=0.05)
    assert said["step_ms"] == pytest.approx(took.milliseconds, rel=0.15)
