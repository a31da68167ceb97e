"""`moefold doctor chaos`: faults on a real supervised run are named and survived, and a fault that is not is told."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from moefold.cli import chaos_faults, chaos_links
from moefold.cli.chaos import FAULT_NAMES, ChaosOptions, FaultOutcome, chosen_faults, shortened, steps_lost
from moefold.cli.chaos_faults import MACHINE_FAULTS, draw_place, flip_in_newest
from moefold.cli.chaos_job import RANKS, RunFiles
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.fault_order import parse_fault
from tests.support.launched import launched


@pytest.mark.extended
def test_a_sample_of_faults_is_named_and_survived_with_the_losses_of_the_undisturbed_run(tmp_path: Path):
    """A killed rank behind a damaged checkpoint, and a NaN in a gradient."""
    words = ["doctor", "chaos", "--faults", "file,nan", "--seed", "3", "--steps", "30", "--timeout", "60"]
    with launched(words, tmp_path / "log") as command:
        assert command.wait() == 0, command.output()
        said = command.output()
    assert said.startswith("seed 3; file, nan;")
    assert "is damaged" in said
    assert "2 of 2 faults survived" in said
    (left,) = [line.rpartition(" ")[2] for line in said.splitlines() if "runs are in" in line]
    assert not Path(left).exists()


@pytest.mark.parametrize("steps", [30, 60, 500])
def test_faults_are_drawn_by_the_seed_behind_the_first_checkpoints_and_before_the_last(steps: int):
    for seed in range(50):
        rank, step = draw_place(random.Random(seed), steps)
        assert 0 <= rank < RANKS
        assert 10 < step <= max(11, steps // 2)
    for fault in MACHINE_FAULTS.values():
        first, again = (fault.draw(random.Random("5 x"), steps) for _ in range(2))
        assert (first.rank, first.step, first.keys) == (again.rank, again.step, again.keys)
        order = first.keys.get("observe.fault")
        if order:
            assert parse_fault(order).rank == first.rank


def test_one_bit_of_the_newest_checkpoint_is_flipped(tmp_path: Path):
    for name in ("step-00000005", "step-00000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").write_bytes(bytes(64))
    flip_in_newest(tmp_path, random.Random(1))
    changed = (tmp_path / "step-00000010" / "a.safetensors").read_bytes()
    assert sum(octet.bit_count() for octet in changed) == 1
    assert (tmp_path / "step-00000005" / "a.safetensors").read_bytes() == bytes(64)


def test_what_needs_root_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert chaos_links.link_hindrance() == "network namespaces need root"
    assert chaos_faults.mount_hindrance() == "mounting a small tmpfs needs root"
    skipped = FaultOutcome("cut", "network namespaces need root", is_skipped=True)
    assert skipped.cells()[-1] == "skipped"


def test_a_fault_is_survived_if_the_run_ends_well_with_equal_losses():
    assert FaultOutcome("kill", "", code=0, is_equal=True).is_survived
    assert not FaultOutcome("kill", "", code=0, is_equal=False).is_survived
    assert not FaultOutcome("kill", "", code=1, is_equal=True).is_survived
    assert FaultOutcome("kill", "").cells()[-2:] == ["NOT equal", "NO"]


def test_steps_are_lost_from_the_resumed_checkpoint_to_the_fault(tmp_path: Path):
    run = RunFiles(tmp_path)
    run.out.mkdir()
    assert steps_lost(run) == 0
    restarts = [{"step": 14, "cause": "a"}, {"step": 21, "cause": "b"}]
    (run.out / "restarts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in restarts))
    run.log.write_text("resumed from x/step-00000010 at step 10\nstep 20\nresumed from x/step-00000020 at step 20\n")
    assert steps_lost(run) == 3


def test_the_part_of_a_line_is_shown_that_names_the_fault():
    line = "restart 1 of 3; step 4: not finite: NaN in x, rank 1; more"
    assert shortened(line, "NaN in x") == "NaN in x, rank 1"


def test_unknown_faults_and_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["doctor", "chaos", "--faults", "kill,quake"]) == 2
    assert '--faults has "quake"; expected all, or some of kill, stop' in capsys.readouterr().err
    with pytest.raises(UserError, match="--steps 10 leaves no room"):
        chosen_faults(ChaosOptions(steps=10))
    assert chosen_faults(ChaosOptions()) == list(FAULT_NAMES)
