"""Ranks of tests (tests/support/ranks.py): results by rank, failures by name, and nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from moefold.layout.axes import World
from tests.support.launched import is_alive, wait_until
from tests.support.ranks import CONTEXT, fork_ranks, run_ranks


def write_pid(world: World, folder: str) -> int:
    pid = os.getpid()
    (Path(folder) / str(pid)).touch()
    return pid


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def die(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def never_end(world: World, folder: str) -> None:
    write_pid(world, folder)
    signal.pause()


def test_every_rank_is_a_process_of_its_own_and_gone_afterwards(tmp_path: Path):
    pids = run_ranks(write_pid, 3, str(tmp_path))
    assert len({os.getpid(), *pids}) == 4
    assert not any(map(is_alive, pids))


def test_a_rank_that_dies_is_named():
    with pytest.raises(AssertionError, match="rank 1 of 3 failed: it died without a word"):
        run_ranks(die, 3)


def test_ranks_die_with_the_process_that_wants_them(tmp_path: Path):
    """Whose end of a pipe is closed by its death."""
    answers = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    wanted, hold = CONTEXT.Pipe(duplex=False)
    work = (never_end, str(tmp_path), {}, (str(tmp_path),), [writer for _, writer in answers], wanted)
    parent = CONTEXT.Process(target=fork_ranks, args=work)
    parent.start()
    assert wait_until(lambda: len(pids_in(tmp_path)) == 2)
    assert all(map(is_alive, pids_in(tmp_path)))
    hold.close()
    parent.join()
    assert not any(map(is_alive, pids_in(tmp_path)))
