"""`moefold bench recipes`: variants and seeds over the same steps, each run in a file of its own; distances and spreads
by hand."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from moefold.bench.formats import VARIANTS
from moefold.bench.recipe_runs import RecipeRun
from moefold.bench.recipes import COLOURS, moving_mean, runs_by_variant, variant_row
from moefold.cli.bench import run_command


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the larger model would run")
def test_processes_share_a_folder_and_measured_runs_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shared = ["recipes", "--json", "--steps", "2", "--seed", "1", "--out", str(tmp_path)]
    small = ["--model.moe.experts", "4", "--train.validate_sequences", "2"]
    assert run_command([*shared, "--variant", "nvfp4, round to nearest", *small]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["results"][0]["from_plain"] is None, "no run in bf16 to compare with yet"
    measured = tmp_path / "runs" / "nvfp4-round-to-nearest-1.json"
    changed = json.loads(measured.read_text()) | {"held_out": 7.0}  # a run would give another
    measured.write_text(json.dumps(changed))
    assert run_command([*shared, "--variant", "bf16", "nvfp4, round to nearest", *small]) == 0
    report = json.loads(capsys.readouterr().out)
    plain, nearest = report["results"]
    assert (plain["variant"], nearest["held_out"]) == ("bf16", 7.0)
    assert 4 < plain["held_out"] < 7, "untrained, a byte of 256 costs 5.5"
    svg = (tmp_path / "recipes.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert svg.count("<polyline") == 4, "two losses and two differences"
    assert run_command([*shared, "--variant", "nvfp4, round to nearest", *small, "--optim.lr", "0.5"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert [row["held_out"] == 7.0 for row in other["results"]] == [False], "a run of other keys is another run"


def run_of(variant: str, seed: int, held_out: float) -> RecipeRun:
    return RecipeRun(variant, seed, "keys", [9.0, 4.0, 2.0], held_out, 0.1, 5.0)


def test_a_distance_is_the_mean_over_seeds_of_shares_of_bf16_with_the_same_seed():
    plain = [run_of("bf16", 1, 2.0), run_of("bf16", 2, 4.0)]
    mine = [run_of("nvfp4", 2, 4.4), run_of("nvfp4", 1, 2.1)]
    row = variant_row("nvfp4", runs_by_variant([*mine, *plain]))
    assert row["from_plain"] == pytest.approx(0.075)
    assert row["furthest"] == pytest.approx(0.1)
    assert row["spread"] == pytest.approx(2.3 / 3.25)
    assert row["last"] == pytest.approx(5.0)


def test_the_first_means_are_over_fewer_steps():
    assert moving_mean([1.0, 3.0, 5.0]) == [1.0, 2.0, 3.0]


def test_every_variant_has_a_colour_of_its_own():
    assert len(set(COLOURS)) >= len(VARIANTS)
