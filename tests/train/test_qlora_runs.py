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
from moefold.config.run import Config, LoraConfig, ParallelConfig
from moefold.layout.axes import single_rank_world
from moefold.layout.held_blocks import held_blocks_of
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import Trace, first_mismatch, random_corpus, single_rank_config
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, corpus
from tests.train.test_lora_runs import LORA, config_of, random_adapters, traced


def assembled(config: Config) -> Run:
    run = assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))
    random_adapters(run)
    return run


@pytest.mark.parametrize(("preset", "base"), [("tiny", "nf4"), ("deepseek-v3", "mxfp4")])
def test_a_run_beside_blocks_is_one_beside_what_they_stand_for(preset: str, base: str):
    config = config_of(preset, lora=replace(LORA, base=base))
    run = assembled(config)
    plain = assembled(replace(config, lora=LORA))
    weights = dict(plain.model.named_parameters())
    held = 0
    for name, parameter in run.model.named_parameters():
        blocks = held_blocks_of(parameter)
        is_product = any(place in name for place in ("attention", "dense", "experts", "shared"))
        is_base = is_product and not name.endswith(("norm.weight", ".lora.a", ".lora.b", "shared.gate.weight"))
        assert (blocks is not None) == is_base, name
        if blocks is not None:
            held += 1
            assert not torch.equal(weights[name], blocks.dequantised())
            weights[name].data.copy_(blocks.dequantised())
    assert held >= 12
    losses = [take_next_step(run).loss for _ in range(2)]
    expected = [take_next_step(plain).loss for _ in range(2)]
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, parameter in run.model.named_parameters():
        if ".lora." in name:
            torch.testing.assert_close(parameter, weights[name], rtol=0, atol=1e-9)


def test_a_layout_of_four_ranks_is_equal_to_one():
    """Inputs that ranks share out are whole blocks; experts, heads and gate and up are cut over ranks too."""
    lora = replace(LORA, base="mxfp4")
    config = config_of("qwen3-30b-a3b", 4, lora=lora, parallel=ParallelConfig(tp=2, ep=2, etp=2))
    attention = replace(config.model.attention, head_dim=32)
    moe = replace(config.model.moe, ffn=64)
    config = replace(config, model=replace(config.model, attention=attention, moe=moe))
    expected = without_base(traced(single_rank_world(), single_rank_config(config)))
    ranks = run_ranks(traced, 4, config)
    assert first_mismatch(expected, [without_base(trace) for trace in ranks], 1e-9) is None
    assert any(".lora.b" in entry.what and bool(entry.values.any()) for entry in expected)


def without_base(trace: Trace) -> Trace:
    """Losses, tokens, gradients and adapters: what the base computes with. The base itself is in boxes of an expert,
    which a trace does not join."""
    return [entry for entry in trace if "weight" not in entry.what or ".lora." in entry.what]


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
