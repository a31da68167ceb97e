"""Ranks that were started with different options, settings or data are refused on all ranks before the first step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moefold.layout.spawn import find_free_port
from tests.support.ranks import CONTEXT
from tests.support.runs import SMALL, be_command, corpus, start

RANKS = 3
# What one rank is given besides, and how the refusal names it.
ODD_OPTIONS = {
    "resume": (["--resume", "auto"], "--resume = auto on rank"),
    "resume from a path": (["--resume", "{folder}/elsewhere"], "--resume = {folder}/elsewhere on rank"),
    "out": (["--out", "{folder}/b"], "--out = {folder}/b on rank"),
    "init_from": (["--init-from", "{folder}/elsewhere"], "--init-from = {folder}/elsewhere on rank"),
    "a layout": (["--parallel.ep", "3", "--model.moe.experts", "3"], "parallel.ep = 3 on rank"),
    "a step count": (["--train.steps", "5"], "train.steps = 5 on rank"),
    "a text": (["--data.files", "{folder}/other.txt"], "data.files = {folder}/other.txt on rank"),
}


def start_ranks(folder: Path, odd: list[str], number: int) -> list[tuple[int | None, str]]:
    """Exit code and output of each rank; rank `number` is started with `odd` words besides."""
    argv = ["train", "tiny", *SMALL, *corpus(folder), "--train.steps", "2", "--train.global_batch", "6"]
    argv += ["--out", str(folder / "a"), "--force"]
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = []
    for rank in range(RANKS):
        words = argv + odd if rank == number else argv
        env = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(start(words, folder / f"log-{rank}", env))
    for process in ranks:
        process.join(150)
        process.kill()
    return [(process.exitcode, (folder / f"log-{rank}").read_text()) for rank, process in enumerate(ranks)]


@pytest.mark.parametrize("what", ODD_OPTIONS)
def test_a_rank_with_another_option_is_refused_before_anything_is_written(tmp_path: Path, what: str):
    odd, named = ODD_OPTIONS[what]
    number = 1 + list(ODD_OPTIONS).index(what) % (RANKS - 1)
    shutil.copy(Path(corpus(tmp_path)[-1]), tmp_path / "other.txt")
    found = start_ranks(tmp_path, [word.format(folder=tmp_path) for word in odd], number)
    assert [code for code, _ in found] == [2] * RANKS, found
    assert named.format(folder=tmp_path) + f" {number}, but" in found[0][1]
    assert "Traceback" not in str(found)
    assert not (tmp_path / "a").exists()


def be_rank_in_folder(argv: list[str], log: str, env: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    be_command(argv, log, env)


def test_ranks_that_read_other_text_under_the_same_name_are_refused(tmp_path: Path):
    """As on nodes whose disks are not the same: each rank has its own working folder and a relative path."""
    argv = ["train", "tiny", *SMALL, "--data.source", "files", "--data.files", "corpus.txt", "--out", f"{tmp_path}/a"]
    argv += ["--train.steps", "2", "--force"]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = []
    for rank in range(2):
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        path = Path(corpus(folder)[-1])
        if rank == 1:
            text = path.read_text()
            path.write_text(text[:5000] + "X" + text[5001:])
        words = (argv, str(tmp_path / f"log-{rank}"), place | {"RANK": str(rank)}, str(folder))
        ranks.append(CONTEXT.Process(target=be_rank_in_folder, args=words))
        ranks[-1].start()
    for process in ranks:
        process.join(150)
        process.kill()
    said = (tmp_path / "log-0").read_text()
    assert [process.exitcode for process in ranks] == [2, 2], said
    assert "fingerprint of the data = " in said
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
