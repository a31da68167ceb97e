"""fp8.jsonl of whole runs: the same over ranks and pipeline stages, without effect on training, none in plain runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from moefold.config.precision_recipes import RECIPE_SPECS, is_fp8
from moefold.layout.axes import World, single_rank_world
from moefold.observe.fp8_stats import OPERAND_KINDS, ProductOperands
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.operand_log import read_operands
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL as SMALL_COMMAND
from tests.support.runs import corpus
from tests.train.test_delayed_runs import ONE_FUNCTION, SMALLER
from tests.train.test_fp8_runs import SMALL, counting_corpus

FP8 = list(filter(is_fp8, RECIPE_SPECS))
PRODUCTS = ["attention.query, key, value", "attention.out", "moe.experts.up_product", "moe.experts.down_product"]


def make_run(recipe: str, *more: str, world: World | None = None) -> Run:
    world = world or single_rank_world("cpu")
    words = [*SMALL, *SMALLER, "--train.micro_batch", "1", "--precision.recipe", recipe, *more]
    config = resolve_recipe("tiny", words, world.size)
    return assemble_run(config, world, Path("unused"), counting_corpus())


def first_step(run: Run) -> tuple[float, list[ProductOperands]]:
    report = take_next_step(run)
    operands = report.operands
    return report.loss, [] if operands is None else read_operands(operands, run.config.model.layers)


RECORD = ["--observe.fp8_every", "1"]


@pytest.mark.parametrize("experts", [[], ONE_FUNCTION], ids=["composed", "one function"])
@pytest.mark.parametrize("recipe", FP8)
def test_every_operand_of_every_recipe_is_seen_and_the_loss_is_that_of_an_unrecorded_step(
    recipe: str, experts: list[str]
):
    unrecorded = make_run(recipe, *experts)
    recorded = make_run(recipe, *experts, *RECORD)
    plain_losses: list[float] = []
    losses: list[float] = []
    for _ in range(2):
        loss, seen = first_step(unrecorded)
        plain_losses.append(loss)
        assert seen == []
        loss, seen = first_step(recorded)
        losses.append(loss)
        assert [each.product for each in seen] == [f"blocks.0.{name}" for name in PRODUCTS]
        for each in seen:
            for kind in OPERAND_KINDS:
                figures = getattr(each, kind).figures()
                assert 0.005 < figures["error"] < 0.05, f"{each.product} {kind}: {figures}"
                assert 0 <= figures["underflow"] < 0.2
                assert figures["saturated"] == 0
                assert 0 < figures["scale_low"] <= figures["scale_high"]
                assert figures["scale_high"] <= figures["amax"] / 448 * 1.001
    assert losses == plain_losses


def seen_on_rank(world: World, recipe: str, words: list[str]) -> list[ProductOperands]:
    return first_step(make_run(recipe, *words, *RECORD, world=world))[1]


TWO_HEADS = ["--model.attention.kv_heads", "2"]
LAYOUTS = {  # degrees, words of the layout, how near figures are
    "data": ({}, [], 1e-5),
    "experts": ({"ep": 2}, ["--parallel.ep", "2", "--parallel.dispatcher", "all_to_all"], 0.01),
    "tensor": ({"tp": 2}, ["--parallel.tp", "2"], 0.01),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_figures_of_one_rank(layout: str):
    """But for scales of half a row, or of a channel over other rows: these round a little otherwise."""
    degrees, words, near = LAYOUTS[layout]
    alone = first_step(make_run("fp8_row", *TWO_HEADS, *RECORD))[1]
    first, second = run_ranks(seen_on_rank, 2, "fp8_row", [*TWO_HEADS, *words], **degrees)
    assert first == second
    for each, judge in zip(first, alone, strict=True):
        assert each.product == judge.product
        for kind in OPERAND_KINDS:
            mine, right = getattr(each, kind).figures(), getattr(judge, kind).figures()
            assert mine["amax"] == pytest.approx(right["amax"], rel=near)
            assert mine["scale_high"] == pytest.approx(right["scale_high"], rel=near)
            assert mine["error"] == pytest.approx(right["error"], rel=10 * near)
            assert mine["underflow"] == pytest.approx(right["underflow"], abs=near / 5)


@pytest.mark.extended
def test_a_run_writes_a_line_for_every_recorded_step_of_all_stages_and_a_plain_run_none(tmp_path: Path):
    words = [*SMALL_COMMAND, *corpus(tmp_path), "--train.device", "cpu", "--train.sample_tokens", "0"]
    words += ["--train.steps", "4", "--observe.fp8_every", "2", "--train.global_batch", "2", "--train.micro_batch", "1"]
    staged = ["--nproc", "2", "--parallel.pp", "2", "--precision.recipe", "fp8_block"]
    assert run_command_line(["train", "tiny", *words, *staged, "--out", str(tmp_path / "fp8")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "fp8" / "fp8.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert line["products"] == [f"blocks.{layer}.{name}" for layer in range(2) for name in PRODUCTS]
        assert line["layers"] == [0] * 4 + [1] * 4
        assert line["warnings"] == []
        assert all(0.005 < error < 0.05 for kind in OPERAND_KINDS for error in line[kind]["error"])
    assert run_command_line(["train", "tiny", *words, "--train.steps", "1", "--out", str(tmp_path / "plain")]) == 0
    assert not (tmp_path / "plain" / "fp8.jsonl").exists()
