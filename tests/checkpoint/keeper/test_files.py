"""A checkpoint in the memory of keepers is a checkpoint: found, verified, refused where it is damaged, and whole after
any one node is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.checkpoint.format.boxes import whole_box
from moefold.checkpoint.format.retention import RetentionPolicy, committed_checkpoints
from moefold.checkpoint.format.storage import RemotePath
from moefold.checkpoint.keeper.files import KeeperAddress, keeper_name
from moefold.checkpoint.keeper.kept_state import keeps_sound_state
from moefold.checkpoint.live.load import find_checkpoint, load_checkpoint
from moefold.checkpoint.live.logical_tensors import TensorPart, hold_box
from moefold.checkpoint.live.save import save_checkpoint
from moefold.layout.axes import World, single_rank_world
from moefold.train.memory_checkpoints import find_kept, forget_kept
from tests.support.nodes import flip_kept_bits, idle_launcher, kept_folder
from tests.support.ranks import run_ranks

ROWS = 8
NO_DISK = Path("/no/such/folder")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    for name in ("MOEFOLD_LAUNCHER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with idle_launcher() as pid:
        yield kept_folder(single_rank_world(), [pid])


def rows_of_rank(world: World, scale: float) -> dict[str, Any]:
    """A tensor of which every rank holds some rows, and one that all hold."""
    count = ROWS // world.size
    whole = torch.arange(ROWS * 3.0).view(ROWS, 3) * scale
    mine = whole[world.rank * count :][:count].clone()
    box = ((world.rank * count, count), (0, 3))
    common = torch.full((5,), scale)
    return {
        "cut": TensorPart((ROWS, 3), mine.dtype, [hold_box(box, mine)]),
        "common": TensorPart((5,), common.dtype, [hold_box(whole_box((5,)), common)]),
    }


def held_values(tensors: dict[str, Any]) -> list[list[float]]:
    return [part.held[0].read().flatten().tolist() for part in tensors.values()]


def save_step(folder: RemotePath, world: World, step: int) -> None:
    save_checkpoint(folder, step, rows_of_rank(world, step), {"step": step}, RetentionPolicy(1), world)


def test_the_generation_before_goes_when_the_new_one_is_whole(folder: RemotePath):
    world = single_rank_world()
    for step in (1, 2):
        save_step(folder, world, step)
    assert [path.name for path in committed_checkpoints(folder)] == ["step-00000002"]
    found = find_checkpoint(folder, world, str)
    assert found is not None
    loaded = rows_of_rank(world, 0)
    load_checkpoint(found, loaded, set(), world)
    assert held_values(loaded) == held_values(rows_of_rank(world, 2))


def test_what_has_no_manifest_is_no_checkpoint_and_is_forgotten(folder: RemotePath):
    for step in (1, 2):
        save_step(folder, single_rank_world(), step)
    with (folder / "step-00000003" / "rank-00000.safetensors").open("wb") as file:
        file.write(b"half of it")
    assert [path.name for path in committed_checkpoints(folder)] == ["step-00000002"]
    forget_kept(folder, 2, single_rank_world())
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    forget_kept(folder, -1, single_rank_world())
    assert not folder.exists()


def test_a_flipped_bit_in_the_memory_of_a_keeper_leaves_the_run_to_the_disk(folder: RemotePath, tmp_path: Path):
    save_step(folder, single_rank_world(), 1)
    said: list[str] = []
    assert find_kept(folder, tmp_path, single_rank_world(), said.append) is not None
    flip_kept_bits(folder.files.from_here()[0])
    assert find_kept(folder, tmp_path, single_rank_world(), said.append) is None
    assert "copy of /run/step-00000001/rank-00000.safetensors was damaged and is dropped" in said[0]
    assert "checkpoints in memory cannot be used: keepers:/run/step-00000001 is damaged" in said[-1]


def test_a_later_checkpoint_on_the_disk_is_preferred(folder: RemotePath, tmp_path: Path):
    world = single_rank_world()
    save_step(folder, world, 2)
    for step, is_kept in ((1, True), (2, True), (3, False)):
        save_checkpoint(tmp_path, step, rows_of_rank(world, step), {"step": step}, RetentionPolicy(1), world)
        found = find_kept(folder, tmp_path, world, str)
        assert (found is not None) == is_kept


@pytest.mark.usefixtures("folder")
def test_a_copy_is_sound_if_it_is_finite_and_not_older_than_the_disk(tmp_path: Path):
    """Asked by a launcher, for which this process stands; what is not sound is forgotten."""
    world = single_rank_world()
    kept = kept_folder(world, [os.getpid()])
    out = Path(kept.key)
    save_step(kept, world, 2)
    assert keeps_sound_state(out, tmp_path)
    assert kept.exists()
    save_checkpoint(kept, 3, rows_of_rank(world, float("nan")), {"step": 3}, RetentionPolicy(1), world)
    assert not keeps_sound_state(out, tmp_path)
    assert not kept.exists()
    save_step(kept, world, 4)
    save_checkpoint(tmp_path, 5, rows_of_rank(world, 5), {"step": 5}, RetentionPolicy(1), world)
    assert not keeps_sound_state(out, tmp_path)
    assert not kept.exists()


def save_on_nodes(world: World, launchers: list[int]) -> list[str]:
    said: list[str] = []
    folder = kept_folder(world, launchers, said)
    for step in (1, 2):
        save_step(folder, world, step)
    return said


def load_on_nodes(world: World, launchers: list[int]) -> list[list[float]]:
    folder = kept_folder(world, launchers)
    found = find_kept(folder, NO_DISK, world, str)
    assert found is not None
    assert found.state == {"step": 2}
    tensors = rows_of_rank(world, 0)
    load_checkpoint(found, tensors, set(), world)
    assert held_values(tensors) == held_values(rows_of_rank(world, 2))
    save_step(folder, world, 3)
    return [[keeper.port] for keeper in folder.files.keepers]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_loses_nothing_that_the_next_one_has(lost: int):
    """Four ranks on two nodes; one node goes with its keeper, and a new one takes its place."""
    with idle_launcher() as first, idle_launcher() as second, idle_launcher() as newcomer:
        launchers = [first, second]
        said = run_ranks(save_on_nodes, 4, launchers)
        assert "at the keepers of 2 nodes, each rank's at its own and at the next one's" in said[0][0]
        os.kill(launchers[lost], signal.SIGKILL)
        launchers[lost] = newcomer
        assert len(run_ranks(load_on_nodes, 4, launchers)) == 4


@pytest.mark.parametrize("harmed", [0, 1])
def test_a_damaged_copy_of_one_keeper_is_dropped_and_that_of_its_peer_is_read(harmed: int):
    """Both nodes' files have a copy at the harmed keeper, and each node reads its own keeper first."""
    with idle_launcher() as first, idle_launcher() as second:
        launchers = [first, second]
        run_ranks(save_on_nodes, 4, launchers)
        flipped = flip_kept_bits(KeeperAddress(keeper_name(launchers[harmed])))
        assert flipped == 4, "files of ranks"
        assert len(run_ranks(load_on_nodes, 4, launchers)) == 4
