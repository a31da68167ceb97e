"""`moefold bench formats`: errors against fp64 are those of the formats, for every recipe and for transformers; bytes
saved for backward are those that a formula gives."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from moefold.bench.formats import (
    CPU_SHAPES,
    RESULTS,
    TRANSFORMERS,
    VARIANTS,
    FormatFigures,
    clear_tokens,
    draw_numbers,
    layer_figures,
)
from moefold.bench.layer import LAYER_SHAPES, LayerShape
from moefold.cli.bench import run_command
from moefold.config.errors import UserError

SHAPE = LayerShape(hidden=64, ffn=128, experts=4, top_k=2, tokens=48)
# bf16 rounds by 0.17 % on average, E4M3 by 2.6 %, E5M2 by 5.2 %; a result has up to six roundings on its way.
BF16 = 0.01
FP8 = {"output": 0.08, "dx": 0.09, "dW up": 0.09, "dW down": 0.09, "dW router": 0.13}
E5M2_TIMES = 1.6


@pytest.fixture(scope="module")
def figures() -> dict[str, FormatFigures]:
    return layer_figures(SHAPE, "cpu")


@pytest.fixture(scope="module")
def errors(figures: dict[str, FormatFigures]) -> dict[str, dict[str, float]]:
    return {name: found.errors for name, found in figures.items()}


def test_bf16_is_near_fp64_and_so_is_the_layer_of_transformers(errors: dict[str, dict[str, float]]):
    names = ["bf16"] + ([TRANSFORMERS] if importlib.util.find_spec("transformers") else [])
    for name in names:
        assert all(0.001 < errors[name][result] < BF16 for result in RESULTS), f"{name}: {errors[name]}"


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("fp8")])
def test_every_fp8_recipe_is_within_the_error_of_its_formats(name: str, errors: dict[str, dict[str, float]]):
    assert set(errors[name]) == set(RESULTS)
    times = E5M2_TIMES if "e5m2" in name else 1.0
    for result, error in errors[name].items():
        bound = FP8[result] * (times if result != "output" else 1.0)
        assert 0.02 < error < bound, f"{result}: {error:.4f}, expected at most {bound:.4f}"


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith(("mxfp8", "nvfp4"))])
def test_every_micro_format_is_within_the_error_of_its_digits(name: str, errors: dict[str, dict[str, float]]):
    """E4M3 has three digits behind the first in any block; E2M1 has one, so rounds by four times as much."""
    times = 4.0 if name.startswith("nvfp4") else 1.2
    for result, error in errors[name].items():
        assert 0.02 < error < times * FP8[result], f"{result}: {error:.4f}"


def test_stochastic_rounding_costs_gradients_alone_and_rows_are_finer_than_squares(errors: dict[str, dict[str, float]]):
    whole, nearest, rows = errors["nvfp4"], errors["nvfp4, round to nearest"], errors["nvfp4, weight rows"]
    assert nearest["output"] == whole["output"]
    assert nearest["dx"] < whole["dx"], "an unbiased rounding has a larger variance"
    assert rows["output"] < whole["output"]


def test_bytes_saved_for_backward_fall_with_the_width_of_the_formats(figures: dict[str, FormatFigures]):
    saved = {name: found.cost.saved_bytes for name, found in figures.items()}
    assert saved["nvfp4"] < 0.8 * saved["bf16"], "two copies of half a byte for one of two bytes"
    assert saved["fp8_hybrid"] > saved["fp8_block"], "rows in bf16 for weight gradients, beside those in FP8"
    assert all(found.cost.seconds > 0 for found in figures.values())


def test_options_change_what_they_are_about(errors: dict[str, dict[str, float]]):
    for recipe in ("fp8_block", "fp8_tensor", "fp8_row", "fp8_hybrid"):
        plain, coarse = errors[recipe], errors[f"{recipe}, e5m2 dy"]
        assert coarse["output"] == plain["output"], "gradients alone are e5m2"
        assert coarse["dx"] > 1.1 * plain["dx"]
    assert errors["fp8_hybrid"]["output"] == errors["fp8_block"]["output"]
    for weight in ("dW up", "dW down"):
        assert errors["fp8_hybrid"][weight] < errors["fp8_block"][weight], "bf16 weight gradients"
    assert errors["fp8_block, powers of two"]["output"] != errors["fp8_block"]["output"]


def test_the_choice_of_every_token_is_clear():
    numbers = draw_numbers(SHAPE, "cpu")
    assert numbers.x_TD.shape == (SHAPE.tokens, SHAPE.hidden)
    logits = (numbers.x_TD.double() @ numbers.router_ED.double().T).sort(dim=1, descending=True).values
    assert (logits[:, 1] - logits[:, 2]).min() > 0.05
    even = torch.zeros_like(numbers.router_ED)
    assert len(clear_tokens(numbers.x_TD, even, SHAPE)) == 0


def test_layers_on_a_cpu_are_some_of_those_on_a_gpu_and_an_unknown_one_is_refused():
    assert set(CPU_SHAPES) < set(LAYER_SHAPES)
    with pytest.raises(UserError, match="olmoe-7b"):
        run_command(["formats", "--device", "cpu", "--layer", "olmo-7b"])
