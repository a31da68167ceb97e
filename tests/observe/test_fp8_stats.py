"""Figures of FP8 operands from their sums, the lines of fp8.jsonl, and the rule of the warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.observe.fp8_stats import (
    GROWTH,
    LEVELS,
    WINDOW,
    Fp8Log,
    GrowthWatch,
    OperandSums,
    ProductOperands,
    fp8_record,
    layer_curves,
)

NOTHING = OperandSums(0, 0, 0, 0, 0, *[float("-inf")] * 3)


def operand(error: float = 0.026, underflow: float = 0.0, saturated: float = 0.0) -> OperandSums:
    return OperandSums(1000, 1000 * underflow, error**2 * 50, 50, 1000 * saturated, 3.5, 0.25, -0.125)


def product(name: str = "blocks.3.attention.out", layer: int = 3, **gradient: float) -> ProductOperands:
    return ProductOperands(name, layer, operand(), operand(**gradient), NOTHING)


def test_figures_are_shares_ratios_and_extremes_and_none_where_there_was_no_value():
    record = fp8_record(20, [product(underflow=0.25, saturated=0.01)])
    assert record["products"] == ["blocks.3.attention.out"]
    assert record["layers"] == [3]
    expected = {"amax": 3.5, "error": 0.026, "underflow": 0.25, "saturated": 0.01, "scale_low": 0.125}
    assert record["gradient"] == {name: [value] for name, value in (expected | {"scale_high": 0.25}).items()}
    assert set(map(tuple, record["weight"].values())) == {(None,)}
    infinite = operand()._replace(squared_error=float("nan"), amax=float("inf")).figures()
    assert infinite["error"] is None
    assert infinite["amax"] is None


def test_curves_show_the_worst_product_of_a_layer():
    products = [product(error=0.03), product("blocks.3.moe.experts.up_product", error=0.05), product("blocks.4.x", 4)]
    products[1] = products[1]._replace(gradient=products[1].gradient._replace(negated_scale_low=-0.01))
    curves = layer_curves(fp8_record(7, products))
    assert curves["step"] == 7
    assert curves["fp8_gradient_error/layer_3"] == 0.05
    assert curves["fp8_gradient_error/layer_4"] == 0.026
    assert curves["fp8_gradient_scale_low/layer_3"] == 0.01
    assert not any("weight" in name for name in curves)


def warnings_over(values: list[float], figure: str, watch: GrowthWatch | None = None) -> list[tuple[int, str]]:
    """Number of the recorded step, and text."""
    watch = watch or GrowthWatch()
    found: list[tuple[int, str]] = []
    for number, value in enumerate(values):
        shown: dict[str, Any] = {figure: value}
        found += [(number, text) for text in watch.look(fp8_record(number, [product(**shown)]))]
    return found


@pytest.mark.parametrize("figure", LEVELS)
def test_a_layer_whose_figure_grows_is_named_once(figure: str):
    low = 0.03
    high = low * GROWTH * 1.5
    assert high > LEVELS[figure] > low
    [(step, text)] = warnings_over([low] * 10 + [high] * 20, figure)
    bound = max(GROWTH * low, LEVELS[figure])
    means = [(k * high + (WINDOW - k) * low) / WINDOW for k in range(WINDOW + 1)]  # with k high steps in the window
    first = next(k for k, each in enumerate(means) if each > bound)
    assert step == 9 + first
    assert "layer 3" in text
    assert f"{figure} of the gradient of blocks.3.attention.out" in text
    assert '"blocks.3.*: plain"' in text


@pytest.mark.parametrize("figure", LEVELS)
def test_neither_one_high_step_nor_a_slow_drift_below_the_bound_nor_small_figures_warn(figure: str):
    level = LEVELS[figure]
    assert not warnings_over([level] * 8 + [level * GROWTH * 1.5] + [level] * 8, figure)
    assert not warnings_over([level * (1 + 0.4 * i / 50) for i in range(50)], figure)
    assert not warnings_over([level * 0.1] * 8 + [level * 0.9] * 8, figure)
    assert not warnings_over([level * 3] * (WINDOW - 1), figure), "too few steps for a mean"


def test_a_log_goes_on_where_it_was_cut_and_does_not_warn_again(tmp_path: Path):
    path = tmp_path / "fp8.jsonl"
    log = Fp8Log(path, -1)
    said = [log.write(step, [product(error=0.03 if step < 8 else 0.09)]) for step in range(12)]
    log.close()
    [warned] = [step for step, texts in enumerate(said) if texts]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["warnings"] for line in lines] == said
    assert 8 < warned < 12
    again = Fp8Log(path, warned - 1)  # resumed before the warning: it comes again, at the same step
    assert [again.write(step, [product(error=0.09)]) for step in range(warned, 12)] == said[warned:]
    again.close()
    later = Fp8Log(path, 11)
    assert later.write(12, [product(error=0.09)]) == []
    later.close()
    assert len(path.read_text().splitlines()) == 13
