"""`moefold doctor parity` says equal, or names what differs. Bugs are planted in a copy of the source, and the command
itself is run on it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moefold
from tests.support.fuzz_runs import judge_parity

LAYOUT = ["--parallel.tp", "2", "--parallel.ep", "4", "--parallel.dispatcher", "dedup"]


def parity(source: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command with the package that lies in `source`."""
    command = [sys.executable, "-m", "moefold", "doctor", "parity", "tiny", "--world", "4", "--steps", "1", *more]
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, cwd=source, capture_output=True, text=True, timeout=300)


@pytest.mark.extended
def test_a_layout_that_agrees_is_called_equal_with_exit_code_0():
    done = parity(Path(moefold.__file__).parents[1], *LAYOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


def test_degrees_that_do_not_fit_the_ranks_are_refused_before_a_mechanism_is_chosen_for_them():
    dynamic = ["--parallel.context_sizes", "dynamic", "--data.attend", "document", "--data.packing", "best_fit"]
    done = parity(Path(moefold.__file__).parents[1], "--parallel.tp", "4", "--parallel.pp", "2", *dynamic)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "parallel.tp x cp x pp = 8 does not divide the number of ranks, 4" in done.stderr


SHARDED = ["--shard.mode", "zero3", "--shard.sync", "hierarchical"]
WAYS = {
    "zero3": ["--shard.mode=zero3", "--parallel.ep=2"],
    "copies": ["--shard.mode=zero3", "--shard.replicas=2"],
    "two levels": ["--shard.mode=zero3", "--shard.sync=hierarchical"],
    "Muon on the host": ["--optim.rule=muon", "--optim.states=host", "--parallel.tp=2"],
    "in backward": ["--optim.when=backward", "--optim.clip_by=previous", "--shard.replicas=2"],
    "on the host": ["--optim.states=host", "--optim.update=host", "--shard.mode=zero3"],
}


@pytest.mark.parametrize("way", WAYS)
def test_shares_and_updates_of_any_kind_agree_with_one_rank(way: str):
    words = list(WAYS[way])
    assert judge_parity("tiny", words, 4, random.Random(way)) is None
    assert words == WAYS[way], "none is refused"


BUGS = {
    "a gradient norm that skips experts": (
        "shard/gradients.py",
        "        if not bucket.holders:\n            return True\n",
        '        if self.world.size > 1:\n            return bucket.placement.grid == "dense"\n'
        "        if not bucket.holders:\n            return True\n",
        "step 1: gradient norm differs",
    ),
    "a missing sum over tp": (
        "layout/placement.py",
        "if axis not in self.sharded_axes)",
        'if axis not in self.sharded_axes and axis != "tp")',
        "norm.weight",
    ),
    "a dropped token": (
        "dispatch/hop.py",
        "        returned_PD = all_to_all(y_ND, leg.receive, leg.send, self.axis)\n",
        "        returned_PD = all_to_all(y_ND, leg.receive, leg.send, self.axis)\n"
        "        returned_PD = torch.cat((returned_PD[:1] * (self.axis.index != 3), returned_PD[1:]))\n",
        "step 1: loss differs",
    ),
}


LEVELS_BUG = "a sum that leaves out the other node"
BUGS[LEVELS_BUG] = (
    "comm/two_levels.py",
    "    reduction = reduce(in_node.result(), across, allocate)\n    return reduction.arrived()\n",
    "    return in_node.result().view(across.size, -1)[across.index].clone()\n",
    "gradient",
)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named_with_exit_code_1(tmp_path: Path, bug: str):
    file, right, wrong, named = BUGS[bug]
    shutil.copytree(Path(moefold.__file__).parent, tmp_path / "moefold")  # with what is compiled already
    path = tmp_path / "moefold" / file
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    done = parity(tmp_path, *(SHARDED if bug == LEVELS_BUG else LAYOUT))
    assert done.returncode == 1, done.stdout + done.stderr
    assert named in done.stdout
    assert f"4 CPU ranks in nodes of {2 if bug == LEVELS_BUG else 4}, a small model" in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT equal"
