"""The arithmetic that is shown is the arithmetic that was done."""

import re
from dataclasses import replace

import pytest

from moefold.config.errors import UserError
from moefold.plan.memory.explain_memory import explain_memory
from moefold.plan.memory.peak_memory import GIB, fullest_rank, plan_memory
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from tests.plan.memory.test_peak_memory import DEEPSEEK, EVEN

UNITS = {"GiB": GIB, "MiB": 2**20}


def amounts(lines: list[str], indent: int) -> dict[str, float]:
    """The sizes shown at one depth, by name."""
    form = re.compile(rf"^ {{{indent}}}(\S.*?) +([\d,.]+) (GiB|MiB)")
    found = [form.match(line) for line in lines]
    return {m[1]: float(m[2].replace(",", "")) * UNITS[m[3]] for m in found if m}


@pytest.mark.parametrize(
    "choices", [EVEN, replace(EVEN, spread=0.2, graphs="static", recompute=("up",)), PlanChoices()]
)
def test_the_parts_shown_add_up_to_the_rank_that_decides(choices: PlanChoices):
    lines = explain_memory(DEEPSEEK, 256, choices)
    most = fullest_rank(plan_memory(DEEPSEEK, 256, choices))
    assert f"pipeline rank {most.rank} of 4: {most.needed / GIB:,.2f} GiB" in lines[0]
    parts = amounts(lines, 2)
    assert sum(parts.values()) == pytest.approx(most.needed, abs=0.05 * GIB)
    assert parts["activations"] == pytest.approx(most.activations, abs=0.01 * GIB)
    stages = {name: size for name, size in amounts(lines, 4).items() if name.startswith("stage")}
    assert sum(stages.values()) == pytest.approx(most.activations, abs=0.05 * GIB)


def test_every_kept_tensor_is_shown_with_its_factors():
    text = "\n".join(explain_memory(DEEPSEEK, 256, replace(EVEN, recompute=("core",)), rank=2))
    assert re.search(r"experts: pre-activation +0\.25 GiB +32,768 x 4,096 x 2 B", text)
    assert re.search(r"attend: attended +0\.12 GiB +4,096 x 16,384 x 2 B +\(recomputed\)", text)
    assert "pipeline rank 2 of 4" in text


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="no pipeline rank 4; there are 4, counted from 0"):
        explain_memory(DEEPSEEK, 256, EVEN, rank=4)


def test_one_rank_shows_what_a_single_gpu_holds():
    lines = explain_memory(resolve_recipe("olmoe-1b-7b", []), 1)
    assert "head" in "\n".join(lines)
    assert sum(amounts(lines, 2).values()) > 0
