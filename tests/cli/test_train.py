"""A run whose checkpoints find no room is refused at its start; without checkpoints it is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.cli.train import default_run_folder
from moefold.layout.environment import Rendezvous
from moefold.plan.memory.fit_proposals import misfit_problems
from moefold.presets.recipe import resolve_recipe
from tests.support.small_disk import mounted_small_disk

ALONE = Rendezvous(size=1, local_size=1)
WHOLE_FILES = ["--checkpoint.host_gib", "100000"]
NO_CHECKPOINTS = ["--checkpoint.every", "0"]
SMALL = [
    *("tiny", "--train.device", "cpu", "--train.steps", "1", "--data.source", "zipf", "--data.seq_len", "16"),
    *("--train.global_batch", "1", "--train.micro_batch", "1", "--train.sample_tokens", "0"),
    *("--train.validate_sequences", "1", "--observe.tensorboard", "false"),
]


def train(*words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "moefold", "train", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(tmp_path: Path):
    with mounted_small_disk(tmp_path / "disk") as disk:
        place = ["--checkpoint.path", str(disk)]
        code, said = train(*SMALL, *place, "--out", str(tmp_path / "refused"))
        assert code == 2, said
        assert re.search(rf"no space on {disk}: a checkpoint needs [\d.]+ MiB, there are [34]\.\d", said), said
        assert not (tmp_path / "refused" / "metrics.jsonl").exists()
        code, said = train(*SMALL, *place, *NO_CHECKPOINTS, "--out", str(tmp_path / "goes on"))
        assert code == 0, said
        assert "no checkpoint: checkpoint.every = 0" in said


@pytest.fixture(scope="module")
def large() -> list[str]:
    """A run that fits the host memory of this machine, but not together with its checkpoint."""
    words = ["olmoe-1b-7b", "--train.device", "cpu", "--train.precision", "fp32", "--data.seq_len", "128"]
    words += ["--train.global_batch", "1", "--train.micro_batch", "1", "--train.steps", "200"]
    layers = 1.0
    found = [*words, "--model.layers", "1"]
    while fits([*found, *WHOLE_FILES]):
        layers *= 1.15
        found = [*words, "--model.layers", str(int(layers))]
    return found


def fits(words: list[str]) -> bool:
    recipe, *keys = words
    return not misfit_problems(resolve_recipe(recipe, keys, 1), ALONE)


@pytest.mark.extended
def test_host_memory_without_room_for_whole_files_is_refused_with_figures(large: list[str], tmp_path: Path):
    code, said = train(*large, *WHOLE_FILES, "--out", str(tmp_path / "run"))
    assert code == 2, said
    assert re.search(
        r"[\d.]+ GiB of host memory at least \(.*the copy of a checkpoint [\d.]+\); there are [\d.]+", said
    )
    assert not (tmp_path / "run").exists()
    nowhere = ["--data.files", str(tmp_path / "nowhere")]  # text is read before the model is made
    for words in (NO_CHECKPOINTS, []):
        code, said = train(*large, *words, *nowhere, "--out", str(tmp_path / "run"))
        assert code == 2
        assert "does not fit" not in said
        assert "no file" in said


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = resolve_recipe("tiny")
    folders: list[str] = []
    for _ in range(300):  # within a second or two
        folder = default_run_folder(config)
        folder.mkdir(parents=True)
        folders.append(folder.name)
    assert len(set(folders)) == 300
    assert any(re.fullmatch(r"tiny-\d{8}-\d{6}-2", name) for name in folders)
