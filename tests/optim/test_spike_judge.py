"""Spikes are judged against the median of recent steps; skipping them is exact on resume."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median_low

import pytest
import torch

from moefold.observe.metrics import read_records
from moefold.optim.spike_judge import HISTORY, LEAST_HISTORY, MOST_SKIPPED, SpikeJudge
from tests.support.runs import SMALL, command, corpus, numbers

CPU = torch.device("cpu")


def judged(judge: SpikeJudge, loss: float, norm: float = 1.0) -> tuple[bool, bool]:
    is_spike, updates = judge.judge(torch.tensor(loss), torch.tensor(norm, dtype=torch.float64))
    return bool(is_spike), bool(updates)


def is_far(value: float, recent: list[float], deviations: float) -> bool:
    """The same in plain Python."""
    middle = median_low(recent)
    distance = median_low([abs(each - middle) for each in recent])
    return value > middle + deviations * max(distance, 0.01 * abs(middle))


def test_the_limit_is_that_of_medians_over_the_last_steps():
    chance = random.Random(1)
    judge = SpikeJudge(4.0, False, CPU)
    losses: list[float] = []
    spikes = 0
    for step in range(3 * HISTORY):
        loss = float(torch.tensor(2 + chance.gauss(0, 0.1) + (chance.random() < 0.1)))
        expected = step >= LEAST_HISTORY and is_far(loss, losses[-HISTORY:], 4.0)
        assert judged(judge, loss) == (expected, True)
        losses.append(loss)
        spikes += expected
    assert spikes > 5


def test_a_skipped_spike_is_forgotten_and_a_new_level_is_accepted_in_the_end():
    judge = SpikeJudge(4.0, True, CPU)
    for _ in range(LEAST_HISTORY):
        assert judged(judge, 2.0) == (False, True)
    assert judged(judge, 2.0, norm=30.0) == (True, False)
    assert judged(judge, float("nan")) == (False, True), "a step that is not finite is refused elsewhere"
    assert judged(judge, 2.0) == (False, True)
    taken = [judged(judge, 9.0)[1] for _ in range(MOST_SKIPPED + 1)]
    assert taken == [False] * MOST_SKIPPED + [True]


@pytest.mark.extended
def test_a_run_skips_spikes_with_their_sequences_and_a_resumed_run_the_same(tmp_path: Path):
    out = tmp_path / "a"
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(out), "--train.steps", "40", "--force"]
    argv += ["--checkpoint.every", "20", "--observe.spike", "0.5", "--train.skip_spikes", "true"]
    code, said = command(argv, tmp_path / "log")
    assert code == 0, said
    first = numbers(out)
    skipped = [record["step"] for record in first if "skipped_spike" in record]
    assert any(step > 20 for step in skipped), skipped
    step = skipped[0]
    assert first[step]["spike"] == 8 * (step - 1)
    assert f"sequences {8 * (step - 1)} to {8 * step - 1} of the run's order, " in said
    spikes = read_records(out / "spikes.jsonl")
    assert [spike["step"] for spike in spikes if spike["skipped"]] == skipped
    listed = next(spike for spike in spikes if spike["step"] == step)["sequences"]
    assert [sequence["number"] for sequence in listed] == list(range(8 * (step - 1), 8 * step))
    assert all(source == "files" for sequence in listed for source, _ in sequence["documents"])
    earliest = min((out / "checkpoints").iterdir())
    code, said = command([*argv, "--resume", str(earliest)], tmp_path / "log")
    assert code == 0, said
    assert numbers(out) == first
    assert read_records(out / "spikes.jsonl") == spikes
