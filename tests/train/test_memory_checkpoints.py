"""A supervised run with checkpoints in memory goes on from them after a killed rank, and from the disk without them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.kill_trials import kill_one_rank, kill_without_keeper
from tests.support.launched import launched, small_ranks

RANKS = 2


@pytest.mark.extended
def test_a_killed_rank_costs_fewer_steps_than_from_the_disk_and_no_bit_of_the_losses(tmp_path: Path):
    run = kill_one_rank(tmp_path, RANKS)
    assert run.source == "memory", run.said
    assert run.lost_steps < run.lost_from_disk
    assert run.same_losses
    (share,) = re.findall(r"training waited \S+ s for checkpoints in memory: (\S+)% of its time", run.said)
    assert 0 < float(share) < 100


@pytest.mark.extended
def test_a_run_whose_keeper_is_lost_goes_on_and_after_a_killed_rank_from_the_disk(tmp_path: Path):
    run = kill_without_keeper(tmp_path, RANKS)
    assert run.source == "disk", run.said
    assert run.same_losses


def test_a_run_that_needs_more_memory_than_it_may_have_is_refused(tmp_path: Path):
    keys = ["--checkpoint.memory_every", "2", "--checkpoint.memory_gib", "0.001", "--restarts", "2"]
    with launched(small_ranks(tmp_path, "a", 1, *keys), tmp_path / "log") as launcher:
        assert launcher.wait() == 2, launcher.output()
        said = launcher.output()
    assert "GiB on each node, and checkpoint.memory_gib = 0.001; set checkpoint.memory_gib to" in said
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
