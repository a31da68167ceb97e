"""The benchmark of CUDA graphs: what it measures, and its refusals. Timings need a GPU."""

from __future__ import annotations

import pytest
import torch

from moefold.bench.graphs import (
    CASES,
    KINDS,
    MODELS,
    GraphTiming,
    chosen_cases,
    cut_batch,
    graphs_config,
    row_of,
    row_text,
)
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.rules import check_config
from moefold.data.loader import Batch


def test_rows_are_chosen_by_tokens():
    assert chosen_cases(()) == list(CASES)
    assert [(case.tokens, case.microbatches) for case in chosen_cases((2048,))] == [(2048, 1), (2048, 8)]
    with pytest.raises(UserError, match="--tokens 100 is measured by no row; expected some of 512, 2048, 4096"):
        chosen_cases((512, 100))


def test_a_batch_is_cut_to_the_tokens_of_a_row():
    tokens_BS = torch.arange(8 * 4096).view(8, 4096)
    batch = cut_batch(Batch(tokens_BS, tokens_BS + 1, first=16), CASES[0])
    assert batch.tokens_BS.tolist() == [list(range(512))]
    assert batch.labels_BS.tolist() == [list(range(1, 513))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_configurations_are_legal(name: str, kind: str):
    config = check_config(graphs_config(name, kind))
    assert (config.train.micro_batch, config.optim.gradients) == (1, "fp32")


def test_ratios_are_of_the_step_as_a_graph():
    timing = GraphTiming(eager=120.0, busy=60.0, graph=63.0, peak_gib=90.0)
    row = row_of("olmoe-1b-7b", "whole", CASES[-1], timing)
    assert row["over_busy"] == pytest.approx(1.05)
    assert row["least_times"] == 1.9
    assert row_text(row).endswith("graph 63.0, 1.050 over busy, 1.90 times, peak 90.0 GiB")
    static = row_of("olmoe-1b-7b", "static", CASES[-1], timing)
    assert static["least_times"] is None
    assert row_text(static).startswith("olmoe-1b-7b, static, 8 x 2048 tokens")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu_the_benchmark_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "graphs"]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err
