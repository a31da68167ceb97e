"""No rank outlives its launcher, its reader or its folder; a run that was ended says so by its exit code."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.launched import has_steps, is_alive, launched, small_ranks, wait_until
from tests.support.ranks import CONTEXT
from tests.support.runs import SMALL, corpus, start

ENDLESS = ["--train.steps", "100000", "--checkpoint.every", "100000"]
SECONDS_TO_END = 90  # on a very busy machine; a quarter of a second, one step and a checkpoint otherwise


def all_end(ranks: list[int]) -> bool:
    return wait_until(lambda: not any(map(is_alive, ranks)), SECONDS_TO_END)


def test_ranks_end_with_a_checkpoint_when_their_launcher_is_killed(tmp_path: Path):
    with launched(small_ranks(tmp_path, "a", 2, *ENDLESS), tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 3)), launcher.output()
        ranks = launcher.ranks()
        os.kill(launcher.pid, signal.SIGKILL)
        assert all_end(ranks)
        assert "the launcher is gone: saved at step" in launcher.output()
    assert (tmp_path / "a" / "checkpoints" / "latest" / "manifest.json").exists()


def test_ranks_that_still_start_end_when_their_launcher_is_killed(tmp_path: Path):
    with launched(small_ranks(tmp_path, "a", 2, *ENDLESS), tmp_path / "log") as launcher:
        assert wait_until(lambda: len(launcher.ranks()) == 2)
        ranks = launcher.ranks()
        os.kill(ranks[1], signal.SIGSTOP)  # rank 0 waits where ranks meet
        time.sleep(0.5)
        os.kill(launcher.pid, signal.SIGKILL)
        assert all_end(ranks[:1])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_the_launcher_saves_and_is_the_exit_code(tmp_path: Path, number: int):
    with launched(small_ranks(tmp_path, "a", 2, *ENDLESS), tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 3)), launcher.output()
        ranks = launcher.ranks()
        os.kill(launcher.pid, number)
        assert launcher.wait(SECONDS_TO_END) == 128 + number
        assert not any(map(is_alive, ranks))
        said = launcher.output()
    assert f"{signal.Signals(number).name}: saved at step" in said
    assert "rank" not in said.partition("saved at step")[2], "nothing failed"


def test_a_run_under_nohup_goes_on_when_its_terminal_closes(tmp_path: Path):
    argv = small_ranks(tmp_path, "a", 2, "--train.steps", "8")
    with launched(argv, tmp_path / "log", ignored=[signal.SIGHUP]) as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 1)), launcher.output()
        for process in (launcher.pid, *launcher.ranks()):
            os.kill(process, signal.SIGHUP)
        assert launcher.wait() == 0, launcher.output()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_ends_quietly_when_its_output_is_closed(tmp_path: Path, ranks: int):
    """`moefold train ... | head -1`: with a checkpoint, without a word, and no rank is left."""
    reader, writer = CONTEXT.Pipe(duplex=False)
    argv = small_ranks(tmp_path, "a", ranks, *ENDLESS, "--observe.log_every", "100000")
    with launched(argv, tmp_path / "log", output=writer) as launcher:
        writer.close()
        assert wait_until(lambda: has_steps(tmp_path / "a", 3)), launcher.output()
        processes = [launcher.pid, *launcher.ranks()]
        reader.close()
        assert launcher.wait(SECONDS_TO_END) == 128 + signal.SIGPIPE
        assert all_end(processes)
        assert launcher.output() == ""
    assert (tmp_path / "a" / "checkpoints" / "latest" / "manifest.json").exists()


def test_a_run_whose_folder_vanishes_ends_and_does_not_make_a_new_one(tmp_path: Path):
    with launched(small_ranks(tmp_path, "a", 2, *ENDLESS), tmp_path / "log") as launcher:
        assert wait_until(lambda: has_steps(tmp_path / "a", 3)), launcher.output()
        ranks = launcher.ranks()
        shutil.rmtree(tmp_path / "a")
        assert launcher.wait(SECONDS_TO_END) == 1
        assert not any(map(is_alive, ranks))
        said = launcher.output()
    assert f"{tmp_path / 'a'} has vanished: stopped at step" in said
    assert "Traceback" not in said
    assert not (tmp_path / "a").exists()


def test_a_single_process_outlives_its_parent(tmp_path: Path):
    """`moefold train tiny &` from a shell that ends: only ranks of a launcher miss it."""
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(tmp_path / "a"), "--train.steps", "4"]
    process = start(argv, tmp_path / "log", {"RANK": "0", "WORLD_SIZE": "1"})
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
