"""`moefold bench recipes`: plain runs and recipes over the same steps, resumed from what was measured, and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from moefold.bench.options import RecipesOptions
from moefold.bench.recipes import COLOURS, last_losses, moving_mean
from moefold.cli.bench import run_command
from moefold.config.precision_recipes import RECIPE_SPECS


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the larger model would run")
def test_recipes_are_compared_with_plain_runs_and_measured_ones_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["recipes", "--json", "--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    assert run_command([*arguments, "--recipe", "fp8_row"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["losses"]) == {"plain, seed 1", "fp8_row"}
    assert abs(report["summary"]["fp8_row"]["from_plain"]) < 0.02
    measured = tmp_path / "recipes.json"
    changed = json.loads(measured.read_text())
    changed["losses"]["fp8_row"] = [7.0, 7.0]  # a run would give another
    measured.write_text(json.dumps(changed))
    assert run_command([*arguments, "--recipe", "fp8_row"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["losses"]["fp8_row"] == [7.0, 7.0]
    svg = (tmp_path / "recipes.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert svg.count("<polyline") == 4, "two losses and two differences"


def test_the_distance_is_a_share_of_the_plain_run_with_the_same_seed():
    curves = {"plain, seed 1": [9.0, *[3.0] * 100], "plain, seed 2": [4.0] * 100, "fp8_row": [3.3] * 100}
    losses = last_losses(curves)
    assert losses["fp8_row"]["last"] == pytest.approx(3.3)
    assert losses["fp8_row"]["from_plain"] == pytest.approx(0.1)


def test_the_first_means_are_over_fewer_steps():
    assert moving_mean([1.0, 3.0, 5.0]) == [1.0, 2.0, 3.0]


def test_every_recipe_and_three_plain_runs_have_a_colour_of_their_own():
    assert len(set(COLOURS)) >= sum(spec.quantises for spec in RECIPE_SPECS.values()) + RecipesOptions().seeds
