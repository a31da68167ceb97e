"""Peaks of runs that recompute and offload, as `moefold bench memory` measured them on an H200, are those planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.bench.memory import MemoryCase, case_config, offload_cases, one_sequence, recompute_cases
from moefold.config.run import Config
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.memory.peak_memory import GIB, plan_memory
from moefold.plan.memory.rank_stages import count_stage
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe

MEASURED = Path(__file__).parents[3] / "docs" / "benchmarks" / "memory-h200.json"
ROWS: list[dict[str, Any]] = json.loads(MEASURED.read_text())["results"]
PEAKS = {(row["part"], row["model"], row["policy"]): row["peak_gib"] for row in ROWS}
HOPPER = PlanChoices(precision="bf16", device="cuda", capability=90)
CASES = [*(("recompute", case) for case in recompute_cases()), *(("offload", case) for case in offload_cases("cuda"))]


def measured_config(case: MemoryCase) -> Config:
    """Steps with MLA were measured when its backward stored no gradients of scores, as the masked kernels do not."""
    config = case_config(case, "cuda")
    if config.model.attention.kind == "mla":
        return replace(config, kernels=replace(config.kernels, force=("attention=varlen",)))
    return config


@pytest.mark.parametrize(("part", "case"), CASES, ids=str)
def test_a_measured_peak_is_the_planned_one_within_two_percent(part: str, case: MemoryCase):
    policy = case.policy.strip() or "none"
    [rank] = plan_memory(measured_config(case), 1, HOPPER)
    assert rank.total / GIB == pytest.approx(PEAKS[part, case.model, policy], rel=0.02)


def test_the_peak_of_the_longest_sequence_is_the_planned_one():
    length = 280_000
    case = MemoryCase("olmoe-1b-7b", "layer > layer", one_sequence(length))
    config = case_config(case, "cuda")
    config = replace(config, data=replace(config.data, seq_len=length))
    [rank] = plan_memory(config, 1, HOPPER)
    assert rank.total / GIB == pytest.approx(PEAKS["longest", case.model, case.policy], rel=0.005)


def test_two_layers_are_on_their_way_to_the_host_in_forward_and_one_in_the_last_layer():
    words = ["--data.seq_len=32768", "--train.micro_batch=1", "--train.global_batch=1"]
    config = resolve_recipe("olmoe-1b-7b", words)
    portion = make_rank_portion(config, "local", defers_wgrad=False)
    choices = PlanChoices(offload=("layer",))
    three, five = (count_stage(config.model, (("t", 0),) * n, portion, choices) for n in (3, 5))
    assert five.forward - three.forward == pytest.approx((five.offloaded - five.kept) / 5)
