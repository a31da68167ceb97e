"""Runs with adapters beside a base in blocks: they are runs beside what the blocks stand for, on one rank and on a
layout of four; a run goes on from its checkpoint, and its loss stays near that of a plain base."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moefold.cli.main import run_command_line
from moefold.config.run import Config, LoraConfig, MemoryConfig, ParallelConfig, ShardConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.held_blocks import held_blocks_of
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import (
    Trace,
    first_mismatch,
    random_corpus,
    single_rank_config,
    skew_routing_biases,
    trace_one_step,
)
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks
from tests.support.resident_weights import assemble_watched_run
from tests.support.runs import SMALL, corpus
from tests.train.test_lora_runs import LORA, SHARDED, Changes, config_of, random_adapters
from tests.train.test_resume import RANKS, START, wander


def assembled(config: Config) -> Run:
    run = assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))
    random_adapters(run)
    return run


DIRECTED = replace(LORA, dora=True)


@pytest.mark.parametrize(
    ("preset", "base", "lora"),
    [("tiny", "nf4", LORA), ("deepseek-v3", "mxfp4", LORA), ("tiny", "nf4_double", DIRECTED)],
)
def test_a_run_beside_blocks_is_one_beside_what_they_stand_for(preset: str, base: str, lora: LoraConfig):
    config = config_of(preset, lora=replace(lora, base=base))
    run = assembled(config)
    plain = assembled(replace(config, lora=lora))
    weights = dict(plain.model.named_parameters())
    held = 0
    for name, parameter in run.model.named_parameters():
        blocks = held_blocks_of(parameter)
        is_product = any(place in name for place in ("attention", "dense", "experts", "shared"))
        is_base = is_product and ".lora." not in name and not name.endswith(("norm.weight", "shared.gate.weight"))
        assert (blocks is not None) == is_base, name
        if blocks is not None:
            held += 1
            assert not torch.equal(weights[name], blocks.dequantised())
            weights[name].data.copy_(blocks.dequantised())
        elif name.endswith(".magnitude"):  # as long as the rows that blocks stand for
            assert not torch.equal(weights[name], parameter)
            weights[name].data.copy_(parameter)
    assert held >= 12
    losses = [take_next_step(run).loss for _ in range(2)]
    expected = [take_next_step(plain).loss for _ in range(2)]
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, parameter in run.model.named_parameters():
        if ".lora." in name:
            torch.testing.assert_close(parameter, weights[name], rtol=0, atol=1e-9)


HOST = MemoryConfig(offload=("expert_weights",))
LEAN = replace(HOST, recompute=("layer",))
LAYOUTS: dict[str, tuple[str, str, Changes]] = {
    "tp, ep, etp": ("qwen3-30b-a3b", "mxfp4", {"parallel": ParallelConfig(tp=2, ep=2, etp=2)}),
    "full sharding, tp and ep, experts on the host": (
        "qwen3-30b-a3b",
        "mxfp4",
        {"parallel": ParallelConfig(tp=2, ep=2), "shard": SHARDED, "memory": LEAN},
    ),
    "full sharding, stages": ("tiny", "nf4_double", {"parallel": ParallelConfig(pp=2), "shard": SHARDED}),
    "full sharding, magnitudes": (
        "tiny",
        "nf4",
        {"parallel": ParallelConfig(tp=2), "shard": SHARDED, "lora": replace(DIRECTED, dropout=0.25)},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_of_four_ranks_is_equal_to_one(name: str):
    """Inputs that ranks share out are whole blocks; experts, heads and gate and up are cut over ranks too. Fully
    sharded, a rank holds the blocks of its share and of two units."""
    preset, base, changes = LAYOUTS[name]
    lora = changes.get("lora", LORA)
    config = config_of(preset, 4, **{**changes, "lora": replace(lora, base=base)})
    attention = replace(config.model.attention, head_dim=32)
    moe = replace(config.model.moe, ffn=64)
    config = replace(config, model=replace(config.model, attention=attention, moe=moe))
    expected, _ = watched_trace(single_rank_world(), single_rank_config(config))
    ranks = run_ranks(watched_trace, 4, config)
    assert first_mismatch(expected, [trace for trace, _ in ranks], 1e-9) is None
    assert not any(excess for _, excess in ranks)
    assert any(".lora.b" in entry.what and bool(entry.values.any()) for entry in expected)


def watched_trace(world: World, config: Config) -> tuple[Trace, str]:
    """Losses, tokens, gradients and adapters: what the base computes with, which is in boxes of an expert that a trace
    does not join. And what a rank held beyond its share and two units."""
    here = world
    if world.size > 1:
        here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    run, weights = assemble_watched_run(config, here, random_corpus(config))
    skew_routing_biases(run, "skewed")
    with run.executor.observed_by(weights):
        trace = [*trace_one_step(run), *trace_one_step(run)]
    computed = [entry for entry in trace if "weight" not in entry.what or ".lora." in entry.what]
    return computed, weights.excess(config)


@pytest.mark.extended
def test_shares_of_blocks_go_on_from_whole_ones_and_back(tmp_path: Path):
    """Checkpoints have what the blocks stand for, the same from shares as from whole weights."""
    balance = replace(START.model.moe.balance, bias_rate=0.0)
    model = replace(START.model, moe=replace(START.model.moe, balance=balance))
    start = replace(START, model=model, lora=replace(LORA, base="nf4"), train=replace(START.train, precision="fp64"))
    layouts = [
        replace(start, shard=SHARDED, parallel=ParallelConfig(ep=2), memory=HOST),
        replace(start, parallel=ParallelConfig(cp=2, context="ring")),
        start,
        replace(start, shard=ShardConfig("zero3", 2), memory=HOST),
    ]
    for worst, wrong in run_ranks(wander, RANKS, str(tmp_path), layouts, [0, 1, 2, 3, 0])[0]:
        assert not wrong
        assert worst <= 1e-9


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    files = (run / "checkpoints" / "step-00000004").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.extended
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path):
    """The checkpoint has what the blocks stand for, under the names of any run."""
    words = ["train", "tiny", *SMALL, *corpus(tmp_path), "--train.steps", "4", "--checkpoint.every", "2"]
    words += ["--model.moe.balance.bias_rate", "0", "--lora.rank", "2", "--lora.base", "nf4"]
    out = tmp_path / "run"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run_command_line([*words, "--out", str(out)]) == 0
    assert "trained in adapters beside a base in nf4" in said.getvalue()
    expected = last_tensors(out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    with contextlib.redirect_stdout(said):
        assert run_command_line([*words, "--out", str(out), "--resume", "auto"]) == 0
        assert run_command_line(["convert", str(out), str(tmp_path / "merged")]) == 0
    actual = last_tensors(out)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(bool(tensor.isfinite().all()) for tensor in expected.values() if tensor.is_floating_point())


def losses(base: str, steps: int) -> list[float]:
    lora = LoraConfig(rank=4, alpha=8.0, base=base)  # pyright: ignore[reportArgumentType]
    config = config_of("tiny", lora=lora)
    config = replace(config, train=replace(config.train, precision="fp32"))
    run = assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))
    return [take_next_step(run).loss for _ in range(steps)]


def test_losses_stay_near_those_of_a_plain_base():
    """The short form of 300 steps, which docs/lora.md has."""
    plain = losses("plain", 12)
    for base in ("fp8", "nf4_double", "mxfp4"):
        for expected, actual in zip(plain, losses(base, 12), strict=True):
            assert actual == pytest.approx(expected, rel=0.02)
            assert actual != expected
