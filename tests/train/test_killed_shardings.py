"""A fully sharded run whose ranks are killed goes on in other shardings, on as many ranks or fewer, as undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kill_trials import kill_all, newest_on_disk
from tests.support.launched import has_steps, launched, small_ranks, wait_until
from tests.support.runs import metrics

RANKS = 4
STEPS, EVERY = 24, 4
KEYS = [
    *("--train.precision", "fp64", "--train.steps", str(STEPS), "--train.validate_every", str(STEPS)),
    *("--checkpoint.every", str(EVERY), "--train.sample_tokens", "0"),
]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}


def finished(folder: Path, name: str, ranks: int, *options: str) -> dict[int, float]:
    """The losses of a run to its end."""
    with launched(small_ranks(folder, name, ranks, *KEYS, *options), folder / f"{name}.log") as launcher:
        assert launcher.wait() == 0, launcher.output()
    return losses(folder / name)


def killed(folder: Path, name: str, *options: str) -> Path:
    """A run whose ranks were all killed behind a checkpoint, in the middle of later steps."""
    out = folder / name
    with launched(small_ranks(folder, name, RANKS, *KEYS, *options), folder / f"{name}.log") as launcher:
        assert wait_until(lambda: newest_on_disk(out) >= EVERY and has_steps(out, EVERY + 1)), launcher.output()
        kill_all(launcher.ranks())
        assert launcher.wait() not in (0, None), launcher.output()
    return out


@pytest.mark.extended
def test_a_killed_zero3_run_goes_on_as_hsdp_and_as_zero1_on_fewer_ranks(tmp_path: Path):
    expected = finished(tmp_path, "undisturbed", 1)
    out = killed(tmp_path, "killed", "--shard.mode", "zero3")
    first = newest_on_disk(out) + 1
    assert EVERY < first <= STEPS, "killed in the middle"
    for name, ranks, sharding in [
        ("hsdp", RANKS, ["--shard.mode", "zero3", "--shard.replicas", "2"]),
        ("zero1", RANKS // 2, ["--shard.mode", "zero1"]),
    ]:
        found = finished(tmp_path, name, ranks, *sharding, "--resume", str(out))
        assert found == pytest.approx({step: expected[step] for step in range(first, STEPS + 1)}, rel=1e-9), name
