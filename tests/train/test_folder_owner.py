"""A folder has one owner: the second run is told who has it, and what a killed run left is taken over."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from moefold.config.errors import UserError
from moefold.train.folder_owner import OWNER_FILE, FolderClaims
from tests.support.launched import has_steps, wait_until
from tests.support.runs import SMALL, command, corpus, start


def small_run(folder: Path, name: str, *more: str) -> list[str]:
    return ["train", "tiny", *SMALL, *corpus(folder), "--out", str(folder / name), *more]


def test_a_second_run_in_a_folder_is_told_who_has_it_and_may_take_over_when_the_first_is_killed(tmp_path: Path):
    endless = ["--train.steps", "100000", "--checkpoint.every", "1"]
    first = start(small_run(tmp_path, "a", *endless), tmp_path / "log")
    assert wait_until(lambda: has_steps(tmp_path / "a", 2))
    before = (tmp_path / "a" / "config.yaml").read_bytes()
    code, said = command(small_run(tmp_path, "a", "--resume", "auto"), tmp_path / "log-2")
    assert code == 2, said
    assert f"{tmp_path / 'a'} is in use by process {first.pid} on {socket.gethostname()}, since 2" in said
    assert "choose another --out" in said
    other = ["--train.steps", "1", "--checkpoint.path", str(tmp_path / "a" / "checkpoints")]
    code, said = command(small_run(tmp_path, "b", *other), tmp_path / "log-2")
    assert code == 2, said
    assert (tmp_path / "a" / "config.yaml").read_bytes() == before
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    steps = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    again = small_run(tmp_path, "a", "--train.steps", str(steps + 1), "--resume", "auto")
    code, said = command(again, tmp_path / "log-2")
    assert code == 0, said
    assert "resumed from" in said


def test_a_released_folder_can_be_claimed_and_a_claimed_one_cannot(tmp_path: Path):
    first, second = FolderClaims(), FolderClaims()
    first.claim(tmp_path)
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
        second.claim(tmp_path)
    first.release()
    second.claim(tmp_path)
    second.release()
    assert (tmp_path / OWNER_FILE).read_text() == ""


@pytest.mark.parametrize("raw", ["", "{", "[]", '{"host": 3}', '{"host": "\\u001b[2J", "pid": 1e999, "since": ""}'])
def test_nonsense_in_the_file_neither_stops_a_claim_nor_reaches_the_terminal(tmp_path: Path, raw: str):
    (tmp_path / OWNER_FILE).write_text(raw)
    holder, second = (tmp_path / OWNER_FILE).open("a"), FolderClaims()
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="in use by another process") as refused:
        second.claim(tmp_path)
    assert "\x1b" not in str(refused.value)
    holder.close()
    second.claim(tmp_path)
    second.release()
