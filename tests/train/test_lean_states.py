"""Runs with few bytes per parameter: 8-bit moments, bf16 weights without main weights, updates inside backward, states
on the host; saved, taken up again, and converted between types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import SMALL, command, corpus, metrics, numbers

LEAN = [
    *("--train.precision", "bf16", "--optim.main", "none", "--optim.moments", "int8", "--train.micro_batch", "8"),
    *("--optim.gradients", "bf16", "--optim.when", "backward", "--optim.clip_by", "previous"),
]
PLAIN_BF16 = ["--train.precision", "bf16"]
ONE_CARD = [*LEAN, "--memory.recompute", "layer", "--checkpoint.every", "0"]  # as for 30 G parameters on one H200


def train(folder: Path, name: str, steps: int, options: list[str]) -> tuple[Path, str]:
    out = folder / name
    text = corpus(folder)
    argv = ["train", "tiny", *SMALL, *text, "--optim.warmup", "2", "--train.steps", str(steps), *options]
    code, printed = command([*argv, "--out", str(out)], folder / f"{name}.log")
    assert code == 0, printed
    return out, printed


def test_a_run_as_on_one_card_learns_and_writes_no_checkpoint(tmp_path: Path):
    out, printed = train(tmp_path, "lean", 20, ONE_CARD)
    losses = [line["loss"] for line in metrics(out) if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert not list((out / "checkpoints").glob("step-*"))
    assert "no checkpoint" in printed


BLOCK_MAIN = ["--train.precision", "bf16", "--optim.main", "fp16", "--optim.moments", "int8"]
ON_HOST = ["--optim.states", "host", "--optim.moments", "bf16"]


BLOCK_GRADIENTS = ["--train.precision", "bf16", "--optim.gradients", "int8", "--train.micro_batch", "2"]


KEPT = {
    "lean": LEAN,
    "host": ON_HOST,
    "muon": [*ON_HOST, "--optim.rule", "muon"],
    "main in blocks": BLOCK_MAIN,
    "gradients in blocks": BLOCK_GRADIENTS,
}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_a_resumed_run_goes_on_to_the_bit(options: list[str], tmp_path: Path):
    whole, _ = train(tmp_path, "whole", 6, ["--checkpoint.every", "3", *options])
    cut, _ = train(tmp_path, "cut", 6, ["--checkpoint.every", "3", *options])
    for path in sorted((cut / "checkpoints").glob("step-00000006*")):
        path.rename(tmp_path / path.name)
    again, printed = train(tmp_path, "cut", 6, ["--checkpoint.every", "3", *options, "--resume", "auto"])
    assert "at step 3" in printed
    assert numbers(again) == numbers(whole)


CHANGES = [
    (PLAIN_BF16, LEAN),
    (LEAN, PLAIN_BF16),
    (LEAN, [*PLAIN_BF16, "--optim.moments", "fp8", "--optim.second_moment", "fp16", "--optim.main", "split"]),
    (PLAIN_BF16, BLOCK_MAIN),
    (BLOCK_MAIN, LEAN),
    (["--optim.moments", "bf16"], ["--optim.states", "host", "--optim.update", "host"]),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_checkpoint_is_taken_up_with_other_types(before: list[str], after: list[str], tmp_path: Path):
    constant = ["--optim.decay", "constant", "--train.sample_tokens", "0"]
    train(tmp_path, "run", 4, [*before, *constant])
    out, printed = train(tmp_path, "run", 8, [*after, *constant, "--resume", "auto"])
    assert "at step 4" in printed
    same, _ = train(tmp_path, "same", 8, [*before, *constant])
    found = metrics(out)[-1]["loss"]
    expected = metrics(same)[-1]["loss"]
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.extended
def test_losses_of_gradients_in_blocks_are_near_those_of_fp32(tmp_path: Path):
    """Accumulated over four microbatches, and summed over two ranks."""
    two = ["--nproc", "2", "--optim.gradient_reduce", "bf16", "--train.micro_batch", "1"]
    curves: list[list[float]] = []
    for kept in ("fp32", "fp16", "fp8", "int8"):
        options = [*PLAIN_BF16, "--optim.gradients", kept, "--train.sample_tokens", "0", *two]
        out, _ = train(tmp_path, kept, 8, options)
        curves.append([line["loss"] for line in metrics(out) if "loss" in line])
    exact, *found = curves
    for curve in found:
        assert curve != exact
        assert curve == pytest.approx(exact, rel=0.01)


@pytest.mark.extended
def test_the_loss_falls_as_with_fp32_moments(tmp_path: Path):
    curves: list[list[float]] = []
    for name in ("fp32", "int8", "fp8"):
        out, _ = train(tmp_path, name, 60, ["--optim.moments", name, "--train.sample_tokens", "0"])
        curves.append([line["loss"] for line in metrics(out) if "loss" in line])
    exact, *found = curves
    assert exact[-1] < exact[0] - 1.5
    for curve in found:
        assert curve == pytest.approx(exact, rel=0.03)
