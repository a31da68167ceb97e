"""Whole runs: repeatable, resumable after anything, the same on any number of ranks."""

import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.sound import describe_last_sound
from moefold.checkpoint.live.save import save_checkpoint
from moefold.cli.chaos_job import rank_processes
from moefold.layout.axes import single_rank_world
from tests.support.runs import SMALL, command, corpus, metrics, numbers, start


def digest(out: Path) -> str:
    """Of every tensor of the newest checkpoint: weights, optimizer, random state."""
    return hashlib.sha256((out / "checkpoints" / "latest" / "rank-00000.safetensors").read_bytes()).hexdigest()


def small_run(tmp_path: Path, name: str, *more: str) -> list[str]:
    return ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(tmp_path / name), *more]


def test_a_run_learns_and_leaves_metrics_configuration_checkpoint_and_a_sample(tmp_path: Path):
    code, output = command(
        small_run(tmp_path, "a", "--train.steps", "60", "--optim.warmup", "5", "--train.validate_every", "20"),
        tmp_path / "log",
    )
    assert code == 0, output
    lines = metrics(tmp_path / "a")
    assert [line["step"] for line in lines] == list(range(61))
    validated = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert list(validated) == [0, 20, 40, 60]
    assert abs(validated[0] - math.log(256)) < 0.1, "an untrained model knows nothing"
    assert validated[60] < 0.75 * validated[0]
    assert lines[60]["val_bits_per_byte"] == pytest.approx(validated[60] / math.log(2), rel=1e-2), "a token is a byte"
    for name in ("loss", "grad_norm", "lr", "tokens_per_s", "tflops", "seconds", "memory_gib"):
        assert name in lines[1]
    for name in ("max_violation", "load_entropy", "dead_experts", "drop_rate", "moved_bytes"):
        assert len(lines[1][name]) == 2, f"one {name} for each layer"
    assert (tmp_path / "a" / "config.yaml").exists()
    assert "a sample:\ndef " in output
    assert (tmp_path / "a" / "checkpoints" / "latest" / "manifest.json").exists()


@pytest.mark.extended
def test_two_runs_with_one_seed_are_bit_identical_and_another_seed_is_not(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        argv = small_run(tmp_path, name, "--train.steps", "8", "--train.seed", str(seed))
        code, output = command(argv, tmp_path / "log")
        assert code == 0, output
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert numbers(tmp_path / "a") != numbers(tmp_path / "c")


def test_the_written_configuration_repeats_the_run(tmp_path: Path):
    assert command(small_run(tmp_path, "a", "--train.steps", "4"), tmp_path / "log")[0] == 0
    again = ["train", str(tmp_path / "a" / "config.yaml"), "--out", str(tmp_path / "b")]
    assert command(again, tmp_path / "log")[0] == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert (tmp_path / "a" / "config.yaml").read_text() == (tmp_path / "b" / "config.yaml").read_text()


STEPS = 12
TWO_MICROBATCHES = ["--train.micro_batch", "4"]
LONG = ["--train.steps", str(STEPS), "--checkpoint.every", "3", "--train.validate_every", "4", *TWO_MICROBATCHES]


@pytest.mark.extended
@pytest.mark.slow
def test_killed_at_a_random_moment_and_resumed_is_bit_identical_ten_times_of_ten(tmp_path: Path):
    whole = tmp_path / "whole"
    begun = time.monotonic()
    assert command(small_run(tmp_path, "whole", *LONG), tmp_path / "log")[0] == 0
    length = time.monotonic() - begun
    chance = random.Random(int(os.environ.get("MOEFOLD_TEST_SEED", "7")))
    for attempt in range(10):
        name = f"killed-{attempt}"
        process = start(small_run(tmp_path, name, *LONG), tmp_path / "log")
        reached = tmp_path / name / "metrics.jsonl"
        target = chance.randrange(1, STEPS)
        while process.is_alive() and not (reached.exists() and reached.read_text().count("\n") > target):
            time.sleep(0.002)
        time.sleep(chance.random() * length / STEPS)
        process.kill()
        process.join()
        code, output = command(small_run(tmp_path, name, *LONG, "--resume", "auto"), tmp_path / "log")
        assert code == 0, output
        assert numbers(tmp_path / name) == numbers(whole), f"attempt {attempt}, killed after step {target}: {output}"
        assert digest(tmp_path / name) == digest(whole), f"attempt {attempt}, killed after step {target}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_leaves_cleanly_and_the_run_goes_on_as_if_nothing_happened(tmp_path: Path, number: int):
    steps = ["--train.steps", "40", "--checkpoint.every", "1000", "--observe.router_every", "3", *TWO_MICROBATCHES]
    assert command(small_run(tmp_path, "whole", *steps), tmp_path / "log")[0] == 0
    process = start(small_run(tmp_path, "a", *steps), tmp_path / "log")
    reached = tmp_path / "a" / "metrics.jsonl"
    while process.is_alive() and not (reached.exists() and reached.read_text().count("\n") > 5):
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join(60)
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 128 + number, said
    assert "saved at step" in said
    assert "--resume auto" in said
    assert 5 <= metrics(tmp_path / "a")[-1]["step"] < 40
    assert command(small_run(tmp_path, "a", *steps, "--resume", "auto"), tmp_path / "log")[0] == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "whole")
    routed, whole = ((tmp_path / name / "router.jsonl").read_text() for name in ("a", "whole"))
    assert routed == whole
    assert routed.count("\n") == 13, "one line every third step"


def test_a_checkpoint_that_cannot_be_written_stops_the_run_by_name_and_leaves_the_ones_before(tmp_path: Path):
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a" / "checkpoints" / "step-00000008.tmp").symlink_to(tmp_path / "elsewhere")
    argv = small_run(tmp_path, "a", "--train.steps", "2000", "--checkpoint.every", "4")
    code, output = command(argv, tmp_path / "log")
    assert code == 1, output
    assert "the checkpoint of step 8 was not written: cannot write in" in output
    assert "Traceback" not in output
    assert 8 <= metrics(tmp_path / "a")[-1]["step"] <= 12
    (tmp_path / "a" / "checkpoints" / "step-00000008.tmp").unlink()
    more = ["--train.steps", "9", "--resume", "auto"]
    code, output = command(small_run(tmp_path, "a", *more), tmp_path / "log")
    assert code == 0, output
    assert "step-00000004 at step 4" in output


@pytest.mark.extended
@pytest.mark.slow
def test_four_ranks_give_the_losses_of_one_rank(tmp_path: Path):
    """The two commands of the README, as a user would type them, with smaller batches, shorter sequences and little
    validation."""
    losses = {}
    little = ["--train.global_batch", "8", "--train.validate_sequences", "8", "--train.sample_tokens", "0"]
    little += ["--data.seq_len", "64"]
    for name, more in (("one", []), ("four", ["--nproc", "4"])):
        argv = ["train", "tiny", "--train.steps", "20", *little, "--out", str(tmp_path / name), *more]
        done = subprocess.run([sys.executable, "-m", "moefold", *argv], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses[name] = [line["loss"] for line in metrics(tmp_path / name)[1:]]
    worst = max(abs(a - b) for a, b in zip(losses["one"], losses["four"], strict=True))
    assert worst <= 1e-5, f"largest difference of losses over 20 steps is {worst:.2e}"


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_continues_from_its_checkpoint(tmp_path: Path):
    argv = [*small_run(tmp_path, "a", "--train.steps", "2000", "--checkpoint.every", "5"), "--nproc", "2"]
    process = subprocess.Popen([sys.executable, "-m", "moefold", *argv], stderr=subprocess.PIPE, text=True)
    saved = tmp_path / "a" / "checkpoints" / "latest"
    deadline = time.monotonic() + 60
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(rank_processes(process.pid)[1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in said
    assert "--resume auto" in said
    assert "Traceback" not in said, said
    step = metrics(tmp_path / "a")[-1]["step"]
    more = ["--train.steps", str(step + 3), "--resume", "auto"]
    code, output = command(small_run(tmp_path, "a", *more), tmp_path / "log")
    assert code == 0, output
    assert "resumed from" in output


def test_a_run_is_never_overwritten_without_being_asked(tmp_path: Path):
    assert command(small_run(tmp_path, "a", "--train.steps", "2"), tmp_path / "log")[0] == 0
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    code, output = command(small_run(tmp_path, "a", "--train.steps", "2"), tmp_path / "log")
    assert code == 2
    assert "already holds a run" in output
    assert "--resume auto" in output
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused_by_key(tmp_path: Path):
    assert command(small_run(tmp_path, "a", "--train.steps", "2"), tmp_path / "log")[0] == 0
    argv = small_run(tmp_path, "a", "--train.steps", "4", "--resume", "auto", "--model.moe.experts", "8")
    code, output = command(argv, tmp_path / "log")
    assert code == 2
    assert "model.moe.experts = 8, but the checkpoint has 4" in output


def test_a_loss_that_is_no_number_stops_the_run_before_it_reaches_the_weights(tmp_path: Path):
    argv = small_run(tmp_path, "a", "--train.steps", "200", "--optim.lr", "100", "--optim.max_norm", "1e30")
    argv += ["--optim.warmup", "0", "--model.init_std", "10", "--checkpoint.every", "1", "--train.precision", "bf16"]
    code, output = command(argv, tmp_path / "log")
    if code == 0:
        pytest.fail("the run was meant to diverge")
    assert code == 1, output
    assert "loss is" in output
    assert "the weights were not touched" in output
    assert "Traceback" not in output
    assert all(math.isfinite(line["loss"]) for line in metrics(tmp_path / "a")[1:])
    assert "there is no checkpoint in" in output or "was verified and is sound" in output


def test_a_checkpoint_that_holds_nan_is_not_called_sound(tmp_path: Path):
    world = single_rank_world()
    for step, value in ((1, 1.0), (2, float("nan")), (3, float("inf"))):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = {"model.w": torch.full((3, 5), 2.0).to(dtype), "model.x": torch.tensor([0.5, value]).to(dtype)}
            save_checkpoint(tmp_path / str(dtype), step, tensors, {"step": step}, RetentionPolicy(9), world)
    for folder in tmp_path.iterdir():
        text = describe_last_sound(folder)
        assert 'step-00000003 holds NaN or infinities in "model.x"' in text
        assert 'step-00000002 holds NaN or infinities in "model.x"' in text
        assert f"{folder / 'step-00000001'} was verified and is sound: continue with --resume {folder}" in text


def test_training_in_bf16_on_a_cpu_learns(tmp_path: Path):
    argv = small_run(tmp_path, "a", "--train.steps", "12", "--train.precision", "bf16", "--optim.warmup", "2")
    code, output = command(argv, tmp_path / "log")
    assert code == 0, output
    lines = metrics(tmp_path / "a")
    assert lines[-1]["val_loss"] < 0.9 * lines[0]["val_loss"]


def test_main_weights_as_halves_train_save_and_go_on_as_a_whole_copy_would_and_the_reverse(tmp_path: Path):
    steps = ["--train.steps", "8", "--checkpoint.every", "4", "--train.precision", "bf16"]
    steps += ["--train.micro_batch", "8"]
    lean = ["--optim.gradients", "bf16"]
    for main in ("split", "fp32"):
        argv = small_run(tmp_path, main, *steps, *lean, "--optim.main", main)
        code, output = command(argv, tmp_path / "log")
        assert code == 0, output
    assert numbers(tmp_path / "split") == numbers(tmp_path / "fp32")
    assert digest(tmp_path / "split") == digest(tmp_path / "fp32"), "a checkpoint holds fp32 either way"
    for before, after in (("split", "fp32"), ("fp32", "split")):
        half_way = tmp_path / before / "checkpoints" / "step-00000004"
        name = f"{before}-{after}"
        argv = small_run(tmp_path, name, *steps, *lean, "--optim.main", after, "--resume", str(half_way))
        code, output = command(argv, tmp_path / "log")
        assert code == 0, output
        assert digest(tmp_path / name) == digest(tmp_path / "fp32"), name
