"""`moefold bench transformers`: the report where there is no GPU, and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from moefold.bench.transformers import times_faster
from moefold.cli.bench import run_command
from moefold.config.errors import UserError

pytest.importorskip("transformers")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full models would run")
def test_every_contender_is_timed_on_the_same_model(capsys: pytest.CaptureFixture[str]):
    options = ["--json", "--turns", "1", "--steps", "1", "--model", "qwen3-30b-a3b"]
    assert run_command(["transformers", *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert list(row["milliseconds"]) == ["eager", "batched_mm", "grouped_mm", "moefold", "with layers"]
    assert row["times"] > 0


def test_the_fastest_of_transformers_own_is_what_counts():
    medians = {"eager": 9.0, "grouped_mm": 6.0, "moefold": 1.0, "with layers": 4.0}
    assert times_faster(medians) == 1.5


def test_no_turns_and_unknown_models_are_refused():
    with pytest.raises(UserError, match="--turns 0 is not legal"):
        run_command(["transformers", "--turns", "0"])
    with pytest.raises(UserError, match="olmoe-1b-7b"):
        run_command(["transformers", "--device", "cpu", "--model", "olmoe"])
