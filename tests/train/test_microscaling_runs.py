"""Whole runs in MXFP8 and NVFP4 on a CPU: they learn as plain ones do, repeat to the bit, and agree over ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from moefold.cli.main import run_command_line
from moefold.config.run import Config, ParallelConfig, PipelineConfig, PrecisionConfig
from moefold.dispatch.base import Rows
from moefold.layout.axes import World, single_rank_world
from moefold.model.moe.experts import Experts
from moefold.train.assemble import assemble_run
from moefold.train.parity import TraceEntry, first_mismatch, random_corpus
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from tests.support.ranks import run_ranks
from tests.support.runs import corpus, metrics
from tests.test_fp8_layouts_agree import BASE, differing, everything, on_eight, on_one
from tests.train.test_fp8_runs import MECHANISMS, losses_of, make_run

RECIPES = ["mxfp8", "nvfp4"]
NEAR = {"mxfp8": 0.03, "nvfp4": 0.06}  # of the plain loss, after as many steps
STEPS = 16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_learns_as_it_does_without(recipe: str, tmp_path: Path):
    plain = losses_of(make_run(tmp_path, "plain"), STEPS)
    losses = losses_of(make_run(tmp_path, recipe), STEPS)
    assert losses[-1] < 0.8 * losses[0]
    for mine, right in zip(losses, plain, strict=True):
        assert mine != right
        assert abs(mine - right) < NEAR[recipe] * right


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_trains_near_plain_and_repeats_to_the_bit(name: str, tmp_path: Path):
    """The two recipes take turns along the mechanisms."""
    recipe = RECIPES[list(MECHANISMS).index(name) % 2]
    words = [*MECHANISMS[name], "--precision.exclude_last", "0"]
    mine = losses_of(make_run(tmp_path, recipe, *words), 3)
    again = losses_of(make_run(tmp_path, recipe, *words), 3)
    plain = losses_of(make_run(tmp_path, "plain", *MECHANISMS[name]), 3)
    assert mine == again
    for value, right in zip(mine, plain, strict=True):
        assert value != right
        assert abs(value - right) < NEAR[recipe] * right


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_has_the_same_losses(recipe: str, tmp_path: Path):
    run = make_run(tmp_path, recipe)
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    unbroken = losses_of(run, 3)
    resumed = make_run(tmp_path, recipe)
    resume_run(resumed, "auto", print)
    assert losses_of(resumed, 3) == unbroken


def config_of(recipe: str) -> Config:
    """Narrower than runs in blocks of 128: these blocks are 16 and 32 wide."""
    precision = PrecisionConfig(recipe=recipe, exclude_last=0)  # pyright: ignore[reportArgumentType]
    attention = replace(BASE.model.attention, heads=2, kv_heads=2, head_dim=32)
    moe = replace(BASE.model.moe, ffn=96, shared_ffn=96)
    model = replace(BASE.model, hidden=64, dense_ffn=96, attention=attention, moe=moe)
    return replace(BASE, model=model, data=replace(BASE.data, seq_len=64), precision=precision)


@pytest.mark.parametrize("recipe", RECIPES)
def test_data_parallel_ranks_equal_one_rank_to_the_bit(recipe: str):
    """Random numbers of stochastic rounding too: they are those of the tokens."""
    config = config_of(recipe)
    assert differing(on_one(config, 2), on_eight(config, 2), everything) == []


@pytest.mark.extended
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pipeline_with_deferred_weight_gradients_equals_one_rank_to_the_bit(recipe: str):
    config = config_of(recipe)
    pipeline = PipelineConfig(schedule="zb_h1")
    deep = replace(config, model=replace(config.model, layers=4), parallel=ParallelConfig(pp=4), pipeline=pipeline)
    assert differing(on_one(deep, 2), on_eight(deep, 2), everything) == []


def test_expert_parallel_ranks_equal_one_rank():
    """An expert's rows come from all ranks, as those of one rank with a microbatch of all sequences do. A product in
    fp32 has other last bits with another number of rows."""
    config = replace(config_of("mxfp8"), parallel=ParallelConfig(ep=8, dispatcher="all_to_all"))
    ranks = on_eight(config, 1)

    def is_of_experts(entry: TraceEntry) -> bool:
        return ".experts." in entry.what

    def is_dense(entry: TraceEntry) -> bool:
        return not is_of_experts(entry) and not entry.what.endswith("gradient norm")

    for micro_batch, compared in ((1, is_dense), (8, is_of_experts)):
        one = on_one(config, 1, micro_batch)
        several = [list(filter(compared, rank)) for rank in ranks]
        assert first_mismatch(list(filter(compared, one)), several, 1e-4) is None


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "dedup"])
def test_numbers_of_tokens_travel_with_the_tokens(dispatcher: str):
    """Rounding of experts' gradients is the same on one rank and on four."""
    config = replace(config_of("nvfp4"), parallel=ParallelConfig(ep=4, dispatcher=dispatcher))
    arrived = run_ranks(numbers_of_expert_rows, 4, config)
    whole = numbers_of_expert_rows(single_rank_world("cpu"), replace(config, parallel=ParallelConfig()))
    assert sorted(chain.from_iterable(arrived)) == sorted(4 * whole)


def numbers_of_expert_rows(world: World, config: Config) -> list[int]:
    """Of the first MoE layer, for one microbatch of the same tokens on every rank."""
    run = assemble_run(config, world, Path("unused"), random_corpus(config))
    found: list[int] = []
    layer = next(module for module in run.model.modules() if isinstance(module, Experts))

    def note(_: Experts, inputs: tuple[Rows]) -> None:
        (rows,) = inputs
        assert rows.number_N is not None
        numbers = rows.number_N[rows.order.index_R.long()]
        real = rows.order.index_R >= 0
        found.extend(numbers[real].tolist())

    layer.register_forward_pre_hook(note)
    tokens_BS = torch.arange(config.data.seq_len).view(1, -1)
    with torch.no_grad():
        run.model.logits(tokens_BS)
    return found


@pytest.mark.extended
def test_the_command_trains_tiny_in_nvfp4(tmp_path: Path):
    """The widths of `tiny`, and nothing but the recipe said of its formats."""
    short = ["--data.seq_len", "32", "--train.global_batch", "1", "--train.micro_batch", "1", "--train.steps", "2"]
    short += ["--train.validate_sequences", "1", "--train.sample_tokens", "1", "--observe.log_every", "1"]
    out = tmp_path / "run"
    words = ["train", "tiny", "--precision.recipe", "nvfp4", *short, *corpus(tmp_path), "--out", str(out)]
    assert run_command_line(words) == 0
    losses = [record["loss"] for record in metrics(out) if "loss" in record]
    assert len(losses) == 2
    assert all(3 < loss < 7 for loss in losses)
