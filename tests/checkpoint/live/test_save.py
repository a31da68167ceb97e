"""A checkpoint is there whole or not at all, whatever interrupts its writing."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moefold.checkpoint.format.storage as place_file
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import RetentionPolicy, committed_checkpoints
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.live.load import find_checkpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.save import save_checkpoint
from moefold.comm.byte_counters import counted_object_bytes
from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from moefold.layout.axes import World, create_world
from tests.support.ranks import run_ranks
from tests.support.small_disk import mounted_small_disk

ALONE = create_world(0, 1, torch.device("cpu"), ParallelConfig())


def ignore(_: str) -> None: ...


def content(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), value), "scalar": torch.tensor(value)}


def put(folder: Path, step: int, keep: int = 2, value: float | None = None, keep_every: int = 0) -> Path:
    tensors = content(float(step) if value is None else value)
    return Path(str(save_checkpoint(folder, step, tensors, {"step": step}, RetentionPolicy(keep, keep_every), ALONE)))


def newest(folder: Path) -> tuple[int, float]:
    """The step of the newest whole checkpoint and the value in it; both of its tensors are really loaded."""
    found = require_checkpoint(folder, ALONE, ignore)
    target = content(-1.0)
    load_checkpoint(found, target, set(), ALONE)
    assert (target["weight"] == target["scalar"]).all()
    return found.state["step"], target["scalar"].item()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def all_bytes(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}


def test_a_checkpoint_has_its_final_name_and_verifies(tmp_path: Path):
    path = put(tmp_path / "new" / "folder", 7)
    assert path.name == "step-00000007"
    assert names(path.parent) == {"step-00000007", "latest"}
    assert verify_checkpoint(path).manifest["step"] == 7
    assert newest(path.parent) == newest(path) == (7, 7.0)
    path.parent.rename(tmp_path / "checkpoints")
    assert newest(tmp_path) == (7, 7.0), "a run's folder is searched too"


def test_saving_never_overwrites(tmp_path: Path):
    path = put(tmp_path, 1)
    before = all_bytes(path)
    assert put(tmp_path, 1, value=99.0) == path
    assert all_bytes(path) == before
    assert newest(tmp_path) == (1, 1.0)


def test_keep_prunes_the_oldest_and_latest_points_at_the_newest(tmp_path: Path):
    for step in (9, 10, 100, 1000):
        put(tmp_path, step, keep=2)
        assert (tmp_path / "latest").is_symlink()
        assert os.readlink(tmp_path / "latest") == f"step-{step:08d}"
        assert newest(tmp_path) == newest(tmp_path / "latest") == (step, float(step))
    assert names(tmp_path) == {"step-00000100", "step-00001000", "latest"}
    put(tmp_path, 2000, keep=1)
    assert names(tmp_path) == {"step-00002000", "latest"}


def test_every_nth_is_kept_for_good_beside_the_last_ones(tmp_path: Path):
    for step in range(10, 90, 10):
        put(tmp_path, step, keep=2, keep_every=30)
    assert [p.name[-2:] for p in committed_checkpoints(tmp_path)] == ["80", "70", "60", "30"]


def test_the_order_is_that_of_numbers_beyond_eight_digits_too(tmp_path: Path):
    put(tmp_path, 99_999_999, keep=5)
    put(tmp_path, 100_000_000, keep=5)
    assert [p.name for p in committed_checkpoints(tmp_path)] == ["step-100000000", "step-99999999"]
    assert newest(tmp_path)[0] == 100_000_000


def test_pruning_leaves_what_is_no_checkpoint_alone(tmp_path: Path):
    for name in ("step-notes", "mine", "step-1.bak"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        put(tmp_path, step, keep=1)
    assert names(tmp_path) == {"step-notes", "mine", "step-1.bak", "step-00000003", "latest"}


def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path):
    put(tmp_path, 200, keep=1)  # of an earlier session; this one was resumed from step 100 of another place
    path = put(tmp_path, 150, keep=1)
    assert path.exists()


def spoil(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_to_its_step_again(tmp_path: Path):
    put(tmp_path, 1)
    spoil(put(tmp_path, 2))
    assert newest(tmp_path)[0] == 1
    put(tmp_path, 2)
    assert newest(tmp_path)[0] == 2


def test_leftovers_of_an_interrupted_save_are_ignored_and_then_replaced(tmp_path: Path):
    put(tmp_path, 1)
    left = tmp_path / "step-00000002.tmp"
    shutil.copytree(tmp_path / "step-00000001", left)  # even if it looks whole
    (left / "rubbish").write_text("half a file")
    assert newest(tmp_path) == (1, 1.0)
    put(tmp_path, 2)
    assert newest(tmp_path) == (2, 2.0)
    assert names(tmp_path) == {"step-00000001", "step-00000002", "latest"}
    assert "rubbish" not in names(tmp_path / "step-00000002")


def dying_at(event: str, ending: str) -> None:
    """This process kills itself the moment it is about to do `event` on a path with this ending."""

    def watch(name: str, args: tuple[object, ...]) -> None:
        if name == event and str(args[0]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def save_and_die(world: World, folder: str, event: str, ending: str) -> None:
    dying_at(event, ending)
    save_checkpoint(Path(folder), 3, content(3.0), {"step": 3}, RetentionPolicy(2), world)


MOMENTS = {
    "before the folder": ("os.mkdir", ".tmp", 2),
    "with data and no ledger": ("open", "ledger.json", 2),
    "with a ledger and no state": ("open", "state.json", 2),
    "with state and no manifest": ("open", "manifest.json", 2),
    "with all written and not renamed": ("os.rename", ".tmp", 2),
    "renamed and latest still old": ("os.symlink", "step-00000003", 3),
    "with the new link not yet in place": ("os.rename", "latest.tmp", 3),
    "about to prune": ("shutil.rmtree", "step-00000001", 3),
    "in the middle of pruning": ("os.rmdir", "step-00000001", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_killed_while_saving_leaves_the_previous_checkpoint_or_the_new_one(moment: str, tmp_path: Path):
    event, ending, survivor = MOMENTS[moment]
    put(tmp_path, 1)
    put(tmp_path, 2)
    with pytest.raises(AssertionError, match="it died without a word"):
        run_ranks(save_and_die, 1, str(tmp_path), event, ending)
    assert newest(tmp_path) == (survivor, float(survivor))
    assert newest(tmp_path / "latest")[0] in (2, 3), "the link never dangles"
    put(tmp_path, 3)
    put(tmp_path, 4)
    assert newest(tmp_path) == (4, 4.0)
    assert names(tmp_path) == {"step-00000003", "step-00000004", "latest"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_small_disk(tmp_path / "disk") as place:
        yield place


def assert_no_room(folder: Path, step: int, size: int) -> str:
    with pytest.raises(UserError) as refused:
        save_checkpoint(folder, step, content(float(step), size), {"step": step}, RetentionPolicy(2), ALONE)
    return str(refused.value)


def test_a_disk_too_small_is_refused_before_writing_with_path_need_and_have(small_disk: Path):
    put(small_disk, 1)
    free = shutil.disk_usage(small_disk).free / 2**20
    message = assert_no_room(small_disk, 2, 3 << 18)  # 3 MiB and one to spare
    assert message.startswith(f"no space on {small_disk}: a checkpoint needs 4.0 MiB, there are {free:.1f}")
    assert names(small_disk) == {"step-00000001", "latest"}
    assert newest(small_disk) == (1, 1.0)


def test_a_disk_said_to_be_too_small_is_refused_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, 1)
    monkeypatch.setattr(place_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 19))
    message = assert_no_room(tmp_path, 2, 1 << 18)
    assert message.startswith(f"no space on {tmp_path}: a checkpoint needs 2.0 MiB, there are 1.5")
    assert "checkpoints written before are untouched" in message
    assert newest(tmp_path) == (1, 1.0)


def save_while_others_fill_the_disk(world: World, folder: str, event: str, ending: str) -> str:
    """Somebody takes all the space left, after this save has checked that there is enough."""
    filled = []

    def watch(name: str, args: tuple[object, ...]) -> None:
        if not filled and name == event and str(args[0]).endswith(ending):
            filled.append(True)
            try:
                with open(Path(folder) / "filler", "wb", buffering=0) as file:
                    while file.write(bytes(1 << 12)):
                        pass
            except OSError:
                pass

    sys.addaudithook(watch)
    try:
        save_checkpoint(
            Path(folder), 2, content(2.0, 200_000), {"step": 2, "text": "x" * 10_000}, RetentionPolicy(2), world
        )
    except UserError as refused:
        return f"refused: {refused}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize(
    ("event", "ending"),
    [
        ("os.mkdir", ".tmp"),
        ("open", "ledger.json"),
        ("open", "state.json"),
    ],
)
def test_a_disk_that_fills_while_saving_is_told_in_a_line_and_the_old_checkpoint_stays(event, ending, small_disk: Path):
    put(small_disk, 1)
    (answer,) = run_ranks(save_while_others_fill_the_disk, 1, str(small_disk), event, ending)
    assert newest(small_disk) == (1, 1.0)
    assert answer.startswith(f"refused: no space left on {small_disk}"), answer[-300:]


def save_with_small_files(world: World, folder: str, who: int) -> str:
    if world.rank == who:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    tensors = {str(i): torch.full((10_000,), float(i)) for i in range(8)}
    try:
        save_checkpoint(Path(folder), 2, tensors, {"step": 2}, RetentionPolicy(2), world)
    except UserError:
        return "refused"
    except BaseException as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize(("size", "who"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_that_cannot_write_makes_every_rank_refuse(size: int, who: int, tmp_path: Path):
    put(tmp_path, 1)
    answers = run_ranks(save_with_small_files, size, str(tmp_path), who)
    assert newest(tmp_path) == (1, 1.0)
    assert answers == ["refused"] * size


def test_a_place_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        put(tmp_path / "file", 1)


def save_something_json_cannot_say(world: World, folder: str) -> str:
    try:
        save_checkpoint(Path(folder), 1, content(1.0), {"step": object()}, RetentionPolicy(1), world)
    except Exception as error:
        return str(error)
    return "saved"


def test_a_mistake_on_rank_zero_is_told_by_every_rank(tmp_path: Path):
    answers = run_ranks(save_something_json_cannot_say, 2, str(tmp_path))
    assert all("not JSON serializable" in answer for answer in answers), answers


def test_nothing_is_found_where_nothing_is(tmp_path: Path):
    assert find_checkpoint(tmp_path, ALONE, ignore) is None
    assert find_checkpoint(tmp_path / "nowhere", ALONE, ignore) is None
    (tmp_path / "checkpoints" / "step-00000001.tmp").mkdir(parents=True)
    assert find_checkpoint(tmp_path, ALONE, ignore) is None
    with pytest.raises(UserError, match="no such folder"):
        require_checkpoint(tmp_path / "nowhere", ALONE, ignore)
    with pytest.raises(DamagedCheckpoint, match=r"no manifest\.json"):
        verify_checkpoint(tmp_path)


def everywhere(world: World, folder: str) -> str:
    return require_checkpoint(Path(folder), world, ignore).path.name


def test_every_rank_finds_the_same_checkpoint(tmp_path: Path):
    put(tmp_path, 1)
    spoil(put(tmp_path, 2))
    assert run_ranks(everywhere, 4, str(tmp_path)) == ["step-00000001"] * 4


def save_replicas(world: World, folder: str) -> int:
    """Save tensors that every rank holds whole. Returns the bytes of host objects that reached this rank."""
    tensors = {f"tensor {number}": torch.full((50,), float(number)) for number in range(100)}
    with counted_object_bytes() as held:
        save_checkpoint(Path(folder), world.size, tensors, {"step": world.size}, RetentionPolicy(9, 0), world)
    return held["world"]


def test_only_rank_zero_holds_more_objects_in_a_larger_world(tmp_path: Path):
    first, second = (run_ranks(save_replicas, size, str(tmp_path)) for size in (2, 4))
    assert second[0] > 1.3 * first[0], "rank 0 plans for all ranks"
    assert max(second[1:]) < 1.1 * max(first[1:])
