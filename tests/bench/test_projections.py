"""`moefold bench projections`: the report where there is no GPU, and the refusal of unknown recipes."""

from __future__ import annotations

import json

import pytest
import torch

from moefold.bench.projections import projection
from moefold.cli.bench import run_command
from moefold.config.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full products would run")
def test_every_recipe_has_a_speed_beside_plain(capsys: pytest.CaptureFixture[str]):
    words = ["projections", "--repeat", "1", "--recipe", "fp8_tensor", "fp8_row", "--accumulate", "fast"]
    assert run_command([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["precision"] == {"accumulate": "fast"}
    (row,) = report["results"]
    assert all(row[name] > 0 for name in ("plain", "fp8_tensor", "fp8_row"))
    assert run_command(words) == 0
    assert "accumulate fast" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["plain", "fp8_tensor", "fp8_row", "mxfp8"])
def test_what_is_timed_is_the_product_of_the_layer(recipe: str):
    torch.manual_seed(0)
    exact = projection(64, 48, 32, "cpu", {})()
    torch.manual_seed(0)
    mine = projection(64, 48, 32, "cpu", {"recipe": recipe})()
    assert mine.shape == (64, 48)
    assert (mine - exact).norm() <= 0.05 * exact.norm()
    assert torch.equal(mine, exact) == (recipe == "plain")


@pytest.mark.parametrize(
    "words",
    [
        ["projections", "--scaling", "delayed"],
        ["layer", "--accumulate", "fast"],
        ["step", "--storage", "fp8"],
        ["projections", "--recipe", "plain", "--accumulate", "fast"],
    ],
    ids=" ".join,
)
def test_an_option_that_changes_nothing_that_is_timed_is_refused(words: list[str]):
    with pytest.raises(UserError, match=r"--recipe|precision.recipe"):
        run_command(words)


def test_an_unknown_recipe_is_refused():
    with pytest.raises(UserError, match="fp8_tensor"):
        run_command(["projections", "--recipe", "fp8_tenso"])
