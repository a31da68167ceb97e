"""`moefold bench curves`: three runs of the same steps, their distances, and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from moefold.bench.curves import COMPARISONS, curves_as_svg, loss_distances
from moefold.cli.bench import run_command

CURVES = {"fast": [1.0, 2.0], "reference": [1.5, 1.0], "exact": [1.0, 1.5]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the larger model would run")
def test_fast_kernels_are_compared_with_references_on_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_command(["curves", "--json", "--steps", "2", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    fast, reference, exact = (report["losses"][variant] for variant in ("fast", "reference", "exact"))
    assert len(fast) == len(reference) == len(exact) == 2
    assert fast != exact, "bf16 rounds"
    assert report["summary"]["fast"]["at_most"] < 0.05
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the larger model would run")
def test_optimizers_are_compared_on_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["curves", "--of", "optimizers", "--json", "--steps", "3", "--out", str(tmp_path)]
    assert run_command(command) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    firsts = {tuple(curve[:1]) for curve in losses.values()}
    lasts = {curve[-1] for curve in losses.values()}
    assert len(firsts) == 1, "all begin with the same weights and text"
    assert len(lasts) == len(losses) == 4, "each rule and each state moves weights its own way"
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 7, "four losses, and three differences"


def test_a_curve_strays_by_its_distance_from_fp32():
    distances = loss_distances(CURVES, "exact")
    assert distances["fast"] == {"last": 2.0, "strays": 0.25, "at_most": 0.5}
    assert distances["exact"]["strays"] == 0.0


def test_the_plot_has_a_line_for_every_loss_and_difference():
    assert curves_as_svg(CURVES, COMPARISONS["kernels"]).count("<polyline") == 5, "three losses, and two differences"
