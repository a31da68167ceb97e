"""Reports: JSON or a table, and the tables of reports measured earlier (docs/benchmarks)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moefold.bench.curves import print_curves_report
from moefold.bench.layer import print_layer_report
from moefold.bench.plan import print_plan_report
from moefold.bench.report import show_report
from moefold.bench.step import print_step_report

BENCHMARKS = Path(__file__).parent.parent.parent / "docs" / "benchmarks"
MEASURED: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "layer": ("layer-h200-2026-11-15.json", print_layer_report, "qwen3-30b-a3b"),
    "step": ("step-h200.json", print_step_report, "olmoe-1b-7b, 16"),
    "plan": ("plan-h200.json", print_plan_report, "qwen3-30b, lean"),
    "curves": ("curves-h200.json", print_curves_report, "fast kernels, bf16"),
}


@pytest.mark.parametrize("subject", MEASURED)
def test_a_report_measured_earlier_is_shown_as_json_and_as_a_table(
    subject: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    file, print_table, row = MEASURED[subject]
    report = json.loads((BENCHMARKS / file).read_text())
    assert show_report(report, True, print_table) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert show_report(report, False, print_table) == 0
    table = capsys.readouterr().out
    assert report["card"] in table
    assert row in table
