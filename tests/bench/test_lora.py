"""`moefold bench lora`: its report where there is no GPU, and the goals of its cases."""

from __future__ import annotations

import json

import pytest
import torch

from moefold.bench.lora import CASES, case_config, goal_of
from moefold.cli.bench import run_command
from moefold.config.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the whole model would run")
def test_a_row_for_each_case(capsys: pytest.CaptureFixture[str]):
    words = ["lora", "--steps", "1", "--case", "host", "--data.seq_len", "32", "--train.global_batch", "1"]
    words += ["--train.micro_batch", "1", "--model.layers", "3", "--model.moe.experts", "8", "--lora.base", "nf4"]
    assert run_command([*words, "--json"]) == 0
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["results"]
    assert row["case"] == "host"
    assert row["tokens_per_s"] > 0
    assert row["first_loss"] == pytest.approx(row["last_loss"], rel=0.2)
    assert [line.split(":")[0] for line in printed.err.splitlines() if "tokens/s" in line] == ["host"]


def test_cases_are_all_layers_at_4096_and_the_link_sets_the_goal_of_experts_on_the_host():
    for case in CASES.values():
        config = case_config(case, "cuda")
        assert (config.model.layers, config.data.seq_len, config.lora.rank) == (48, 4096, 16)
        assert case_config(case, "cpu").model.layers < 12
    layer = 2 * 3 * 128 * 768 * 2048
    seconds = 2 * 48 * layer / 55e9
    assert goal_of(CASES["host"], case_config(CASES["host"], "cuda")) == pytest.approx(0.75 * 4 * 4096 / seconds)


def test_an_unknown_case_is_refused():
    with pytest.raises(UserError, match="microbatches"):
        run_command(["lora", "--case", "microbatch"])
