"""The benchmark of optimizers: what it measures and prints. Timings that count need a GPU."""

from __future__ import annotations

import json

import pytest

from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.bench.optimizer import SIZES, adamw_update, timed_row
from moefold.cli.main import run_command_line


def test_the_matrices_are_those_of_twelve_layers_of_qwen3():
    sizes = SIZES["cuda"]
    flops = sizes.matrices * newton_schulz_flops(sizes.rows, sizes.columns, 5)
    assert (sizes.matrices, flops / 1e12) == (4608, pytest.approx(132.2, abs=0.1))


def test_bytes_of_a_parameter_with_8_bit_moments():
    """Weights of two bytes, two codes, and two scales for 128 elements."""
    update, moved, kept = adamw_update("reference", "int8", 1024, "cpu")
    assert kept / 1024 == pytest.approx(4 + 8 / 128)
    assert moved == 2 * kept + 2 * 1024
    update()


def test_rates_are_in_units_of_a_million_millions():
    row = timed_row("copy", "torch", 0.5, 2e12, None)
    assert (row["milliseconds"], row["tera_per_second"]) == (500.0, 2.0)


def test_it_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "optimizer", "--device", "cpu", "--repeat", "1"]) == 0
    assert "Newton-Schulz" in capsys.readouterr().out
    assert run_command_line(["bench", "optimizer", "--device", "cpu", "--repeat", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    found = {row["what"] for row in rows}
    assert found == {"grouped product", "Newton-Schulz", "copy", "AdamW, int8 moments", "AdamW, fp8 moments"}
