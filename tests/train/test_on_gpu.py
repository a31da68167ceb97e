"""Whole runs on a CUDA device, through the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.runs import metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(out: Path, *argv: str) -> list[dict]:
    command = [sys.executable, "-m", "moefold", "train", *argv, "--out", str(out), "--train.sample_tokens", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return metrics(out)


def losses_of(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines[1:]]


def test_tiny_trains_in_bf16_and_learns(tmp_path: Path):
    lines = train(tmp_path / "a", "tiny", "--train.device", "cuda", "--train.precision", "bf16")
    assert lines[-1]["val_loss"] <= 0.40 * lines[0]["val_loss"]


def test_one_layer_of_mixtral_8x7b_trains_in_bf16(tmp_path: Path):
    argv = ["mixtral-8x7b", "--model.layers", "1", "--train.steps", "12", "--train.global_batch", "4"]
    argv += ["--optim.warmup", "4", "--train.validate_sequences", "4", "--train.precision", "bf16"]
    argv += ["--data.tokenizer", "byte"]  # twelve steps suffice to learn which bytes there are
    lines = train(tmp_path / "a", *argv)
    assert lines[-1]["val_loss"] < 0.6 * lines[0]["val_loss"]


LAYOUTS = {
    "data": "",
    "context": "--parallel.cp 2 --parallel.context ring",
    "experts, paired": "--parallel.ep 2 --pipeline.pair true",
    "experts, symmetric": "--parallel.ep 2 --parallel.dispatcher symmetric",
    "pipeline": "--parallel.pp 2",
    "fully sharded": "--shard.mode zero3",
    "fully sharded, experts in parallel": "--shard.mode zero3 --parallel.ep 2",
    "pipeline of four stages, paired": "--parallel.pp 2 --pipeline.vpp 2 --pipeline.schedule dualpipe_v",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_that_share_the_device_give_the_losses_of_one(tmp_path: Path, layout: str):
    """gloo carries CUDA tensors where NCCL refuses two ranks on one device. In fp32, as on the CPU."""
    argv = ["tiny", "--train.steps", "10", "--train.precision", "fp32"]
    one = train(tmp_path / "one", *argv)
    two = train(tmp_path / "two", *argv, "--nproc", "2", *LAYOUTS[layout].split())
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(one[1:], two[1:], strict=True))
    assert worst <= 1e-4, f"largest difference of losses over 10 steps is {worst:.2e}"


@pytest.mark.parametrize("base", ["--lora.base nf4", "--lora.dora true"])
def test_two_fully_sharded_ranks_of_a_frozen_base_give_the_losses_of_one(tmp_path: Path, base: str):
    argv = ["tiny", "--train.steps", "10", "--train.precision", "fp32", "--lora.rank", "4", *base.split()]
    argv += ["--model.moe.balance.bias_rate", "0"]
    one = losses_of(train(tmp_path / "one", *argv))
    two = losses_of(train(tmp_path / "two", *argv, "--nproc", "2", "--shard.mode", "zero3"))
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("storage", ["plain", "fp8"])
def test_two_fully_sharded_ranks_in_fp8_have_the_losses_of_two_with_whole_weights(tmp_path: Path, storage: str):
    argv = ["tiny", "--train.steps", "6", "--train.precision", "bf16", "--nproc", "2"]
    argv += ["--model.hidden", "256", "--model.moe.ffn", "256", "--precision.recipe", "fp8_block"]
    argv += ["--train.global_batch", "4"]  # one microbatch: full sharding adds gradients of ranks before microbatches
    argv += ["--optim.max_norm", "1e9"]  # a norm is summed in another order, by units
    whole = train(tmp_path / "whole", *argv)
    sharded = train(tmp_path / "sharded", *argv, "--shard.mode", "zero3", "--precision.storage", storage)
    assert losses_of(sharded) == losses_of(whole)


def test_a_run_resumed_on_the_device_continues_where_it_was(tmp_path: Path):
    steps = ["--train.steps", "12", "--checkpoint.every", "6"]
    whole = train(tmp_path / "a", "tiny", *steps, "--train.precision", "fp32")
    train(tmp_path / "b", "tiny", "--train.steps", "6", "--train.precision", "fp32")
    resumed = train(tmp_path / "b", "tiny", *steps, "--train.precision", "fp32", "--resume", "auto")
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("window", ["8", "0"], ids=["all fetched ahead", "three slots"])
def test_states_on_the_host_give_the_losses_of_states_on_the_device(tmp_path: Path, window: str, rule: str):
    """Updates run beside the next step: it must wait for each."""
    argv = ["tiny", "--train.steps", "20", "--train.precision", "bf16", "--checkpoint.every", "8"]
    argv += ["--train.validate_every", "6", "--optim.rule", rule]
    there = train(tmp_path / "device", *argv)
    visiting = train(tmp_path / "host", *argv, "--optim.states", "host", "--optim.states_window_gib", window)
    assert losses_of(visiting) == losses_of(there)
    assert visiting[-1]["val_loss"] == there[-1]["val_loss"]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_updates_on_the_host_are_those_on_the_device(tmp_path: Path, precision: str):
    """But for the order of AdamW's operations: torch's fused kernel of the CPU has another."""
    argv = ["tiny", "--train.steps", "8", "--train.precision", precision, "--optim.lr", "1e-4"]
    there = train(tmp_path / "device", *argv)
    here = train(tmp_path / "host", *argv, "--optim.states", "host", "--optim.update", "host")
    assert losses_of(here) == pytest.approx(losses_of(there), rel=1e-5 if precision == "fp32" else 2e-3)
