"""Whole runs in fp16: they learn, an overflow skips its step alone on all ranks, and a resume keeps the scale."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path

import pytest
import torch

from moefold.cli.main import run_command_line
from moefold.config.errors import RunFailure
from moefold.layout.axes import World, single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.non_finite import refuse_non_finite
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from moefold.train.step import take_next_step
from tests.support.kill_trials import newest_on_disk
from tests.support.launched import wait_until
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL as SMALL_COMMAND
from tests.support.runs import command, corpus, metrics, numbers, start
from tests.train.test_fp8_runs import SMALL, counting_corpus
from tests.train.test_step import everything

FP16 = [
    *("--model.layers", "1", "--model.hidden", "32", "--data.seq_len", "32", "--train.micro_batch", "1"),
    *("--train.precision", "fp16", "--optim.warmup", "0", "--optim.decay", "constant", "--optim.lr", "1e-3"),
    *("--model.moe.balance.bias_rate", "0.01"),
]
# Everything that a step may change beside weights and moments.
EVERY_STATE = [
    *("--optim.qk_clip", "0.01", "--model.attention.qk_norm", "none"),
    *("--model.moe.balance.aux_loss", "0.01", "--model.moe.balance.aux_over", "previous_batch"),
]


def make_run(folder: Path, *more: str, world: World | None = None) -> Run:
    world = world or single_rank_world("cpu")
    config = resolve_recipe("tiny", [*SMALL, *FP16, *more], world.size)
    return assemble_run(config, world, folder, counting_corpus())


def overflow_once(run: Run) -> None:
    """The next forward through the last norm gives gradients that are too large for fp16."""
    norm = run.model.head.norm

    def enlarge(*found: object) -> tuple[torch.Tensor, ...]:
        handle.remove()
        outputs = found[-1]
        assert isinstance(outputs, tuple)
        return tuple(x + (x - x.detach()) * 1e4 for x in outputs)

    handle = norm.register_forward_hook(enlarge)


@pytest.mark.parametrize("more", [[], EVERY_STATE, ["--optim.rule", "muon"]], ids=["adamw", "every state", "muon"])
def test_an_overflow_skips_its_step_alone(tmp_path: Path, more: list[str]):
    if "muon" in more:  # torch changes its products in fp16 for good where a first one in bf16 fails, as on this CPU
        take_next_step(make_run(tmp_path, *more))
    run, other = make_run(tmp_path, *more), make_run(tmp_path, *more)
    for both in (run, other):
        for _ in range(2):
            assert take_next_step(both).is_finite
    # The third step of one run overflows; the other run never sees its batch.
    before = everything(run)
    overflow_once(run)
    skipped = take_next_step(run)
    assert not skipped.is_finite
    assert skipped.loss_scale == 65536
    assert all(torch.equal(a, b) for a, b in zip(before, everything(run), strict=True))
    refuse_non_finite(run, skipped)  # which would stop any other run
    other.loader.next_batch()
    other.loss_scale.scale.mul_(0.5)
    for _ in range(3):
        mine, right = take_next_step(run), take_next_step(other)
        assert mine.loss_scale == 32768
        assert (mine.loss, mine.grad_norm) == (right.loss, right.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(everything(run), everything(other), strict=True))
    assert run.step == other.step + 1


@pytest.mark.extended
def test_losses_are_near_those_of_fp32_and_do_not_depend_on_the_scale(tmp_path: Path):
    mine = make_run(tmp_path)
    lower = make_run(tmp_path, "--precision.loss_scale", "16384")
    wide = make_run(tmp_path, "--train.precision", "fp32")
    for _ in range(8):
        loss = take_next_step(mine).loss
        assert loss == pytest.approx(take_next_step(wide).loss, rel=2e-3)
        assert loss == pytest.approx(take_next_step(lower).loss, rel=1e-4)


def test_a_run_whose_scale_cannot_be_halved_any_more_stops(tmp_path: Path):
    run = make_run(tmp_path, "--precision.loss_scale", "1")
    norm = run.model.head.norm
    norm.register_forward_hook(lambda *found: tuple(x * torch.nan for x in found[-1]))
    report = take_next_step(run)
    with pytest.raises(RunFailure, match="step 1: loss is nan"):
        refuse_non_finite(run, report)


def test_a_resumed_run_goes_on_with_the_scale_and_the_count_of_updates(tmp_path: Path):
    growth = ["--precision.loss_scale_growth", "3"]
    run = make_run(tmp_path, *growth)
    with make_background_saver(run, print) as saver:
        take_next_step(run)
        overflow_once(run)
        take_next_step(run)
        take_next_step(run)
        begin_checkpoint(run, saver)
    resumed = make_run(tmp_path, *growth)
    assert resume_run(resumed, str(tmp_path / "checkpoints"), print)
    assert dict(resumed.loss_scale.named_state()) == dict(run.loss_scale.named_state())
    scales: list[float] = []
    for _ in range(4):
        mine, right = take_next_step(resumed), take_next_step(run)
        assert (mine.loss, mine.grad_norm, mine.loss_scale) == (right.loss, right.grad_norm, right.loss_scale)
        scales.append(mine.loss_scale)
    assert scales == [32768, 32768, 65536, 65536], "one clean step was before the checkpoint"
    assert all(torch.equal(a, b) for a, b in zip(everything(run), everything(resumed), strict=True))


Steps = list[tuple[float, float, float]]


def steps_with_overflow(run: Run, overflows: bool) -> Steps:
    """Loss, gradient norm and loss scale of five steps, the third of which overflows if this rank is to."""
    reports = [take_next_step(run), take_next_step(run)]
    if overflows:
        overflow_once(run)
    reports += [take_next_step(run) for _ in range(3)]
    return [(report.loss, report.grad_norm, report.loss_scale) for report in reports]


def router_weights(run: Run) -> dict[str, torch.Tensor]:
    """Of the layers on this rank: each rank of a stage has them whole."""
    run.parameters.await_all_buckets()
    named = run.model.named_parameters()
    return {name: weight.detach().float() for name, weight in named if name.endswith("router.weight")}


def train_on_rank(world: World, words: list[str]) -> tuple[Steps, dict[str, torch.Tensor]]:
    """The overflow is on the last rank alone."""
    run = make_run(Path("."), *words, world=world)
    steps = steps_with_overflow(run, world.rank == world.size - 1)
    return steps, router_weights(run)


# Of losses, norms and weights. Over dp alone every microbatch has the bits of one rank, and gradients are summed in
# fp32. Over tp and ep products have other sums or numbers of rows, which fp16 rounds. Updates follow gradients smoothly
# (`SMOOTH`): with a small eps a gradient near zero moves its weight by all of the learning rate, either way.
EXACT = (0.0, 1e-9, 0.0)
ROUNDED = (1e-4, 1e-3, 2e-5)
SMOOTH = ["--optim.eps", "1e-3"]


@pytest.mark.parametrize("layout", ["", "tp=2 ep=2", "pp=2 ep=2"])
def test_four_ranks_skip_the_step_that_overflows_on_one_of_them(layout: str):
    degrees = dict(word.split("=") for word in layout.split())
    words = [word for axis, degree in degrees.items() for word in (f"--parallel.{axis}", degree)]
    words += ["--model.layers", "2", "--model.attention.kv_heads", "2", *SMOOTH]
    alone = make_run(Path("."), *words[len(degrees) * 2 :])
    right = steps_with_overflow(alone, True)
    assert [scale for *_, scale in right] == [65536] * 3 + [32768] * 2
    found = run_ranks(train_on_rank, 4, words, **{axis: int(degree) for axis, degree in degrees.items()})
    whole = router_weights(alone)
    of_loss, of_norm, of_weights = ROUNDED if layout else EXACT
    for steps, routers in found:
        for (loss, norm, scale), (its_loss, its_norm, its_scale) in zip(steps, right, strict=True):
            assert scale == its_scale
            assert loss == pytest.approx(its_loss, rel=of_loss, nan_ok=True)
            assert norm == pytest.approx(its_norm, rel=of_norm, nan_ok=True)
        for name, weight in routers.items():
            torch.testing.assert_close(weight, whole[name], atol=of_weights, rtol=0)


@pytest.mark.extended
def test_the_command_says_which_steps_were_skipped(tmp_path: Path):
    words = ["--train.precision", "fp16", "--precision.loss_scale", "1e9", "--train.steps", "14"]
    words += ["--observe.log_every", "1", "--optim.warmup", "1", *corpus(tmp_path)]
    out = tmp_path / "run"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_command_line(["train", "tiny", *SMALL_COMMAND, *words, "--out", str(out)]) == 0
    records = metrics(out)[1:]
    skipped = [record["step"] for record in records if "skipped" in record]
    assert skipped[:2] == [1, 2]
    assert 2 < len(skipped) < 14
    assert "step 1/14 | skipped, loss scale was 1G" in printed.getvalue()
    scales = [record["loss_scale"] for record in records]
    assert scales[:3] == [1e9, 5e8, 2.5e8]
    assert all("loss" in record for record in records if record["step"] not in skipped)


@pytest.mark.extended
def test_a_run_that_was_killed_goes_on_with_its_scale(tmp_path: Path):
    """The first steps overflow: a run that began with the first scale once more would skip some again."""
    words = ["train", "tiny", *SMALL_COMMAND, "--train.precision", "fp16", "--precision.loss_scale", "1e9"]
    words += ["--observe.log_every", "1", "--optim.warmup", "0", "--optim.decay", "constant", *corpus(tmp_path)]
    words += ["--checkpoint.every", "12", "--train.validate_every", "1000000"]
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    process = start([*words, "--train.steps", "100000", "--out", str(killed)], tmp_path / "log")
    assert wait_until(lambda: newest_on_disk(killed) > 0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    steps = newest_on_disk(killed) + 5
    again = [*words, "--train.steps", str(steps), "--out"]
    code, said = command([*again, str(killed), "--resume", "auto"], tmp_path / "log")
    assert code == 0, said
    code, said = command([*again, str(unbroken)], tmp_path / "log")
    assert code == 0, said
    found, right = ({record["step"]: record for record in numbers(out)[1:]} for out in (killed, unbroken))
    for step in range(steps - 4, steps + 1):
        assert found[step] == right[step]
        assert found[step]["loss_scale"] < 1e9
