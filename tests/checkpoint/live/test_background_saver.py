"""Saves beside the training: what they hold, whom they keep waiting, and how they fail."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import moefold.checkpoint.live.save as save_file
from moefold.checkpoint.format.boxes import flat_range_boxes, whole_box
from moefold.checkpoint.format.retention import RetentionPolicy, committed_checkpoints
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.host_window import HostWindow
from moefold.checkpoint.live.load import load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import HeldBox, TensorPart, hold_box, hold_flat_box
from moefold.config.errors import RunFailure
from moefold.layout.axes import World, single_rank_world
from moefold.watch.position import HERE, enter_step
from tests.support.ranks import run_ranks


def part(tensor: torch.Tensor) -> TensorPart:
    return TensorPart(tuple(tensor.shape), tensor.dtype, [hold_box(whole_box(tensor.shape), tensor)])


def saver(
    folder: Path | str,
    world: World | None = None,
    said: list[str] | None = None,
    keep: int = 9,
    window_bytes: int | None = None,
) -> BackgroundSaver:
    said = said if said is not None else []
    return BackgroundSaver(Path(folder), RetentionPolicy(keep), world or single_rank_world(), said.append, window_bytes)


def values(folder: Path, step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {"weight": torch.zeros(size), "small": torch.zeros(3)}
    load_checkpoint(
        require_checkpoint(folder / f"step-{step:08d}", single_rank_world(), str), found, set(), single_rank_world()
    )
    return found


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Commits wait until it is set."""
    opened = threading.Event()
    commit = save_file.commit_checkpoint

    def wait_and_commit(*args: Any) -> None:
        assert opened.wait(60)
        commit(*args)

    monkeypatch.setattr(save_file, "commit_checkpoint", wait_and_commit)
    return opened


def test_a_save_returns_before_anything_is_copied_and_holds_the_values_of_that_moment(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    weight, small, may_copy = torch.full((1000,), 1.0), torch.full((3,), 1.0), threading.Event()
    fill = HostWindow.fill
    monkeypatch.setattr(HostWindow, "fill", lambda *args, **more: may_copy.wait(60) and fill(*args, **more))
    with saver(tmp_path) as saves:
        saves.begin_save(1, {"weight": part(weight), "small": small}, {"step": 1})
        small.fill_(2.0)  # plain tensors may change at once
        threading.Timer(0.3, may_copy.set).start()
        saves.wait_for_copy()
        assert may_copy.is_set(), "an update waits for the copy"
        weight.fill_(2.0)  # what is described may change from here on
        assert committed_checkpoints(tmp_path) == []
        gate.set()
    assert all((t == 1.0).all() for t in values(tmp_path, 1).values())


@pytest.mark.parametrize("window_bytes", [None, 1])
def test_the_window_is_used_again_and_each_checkpoint_has_its_own_values(window_bytes: int | None, tmp_path: Path):
    weight, memory = torch.zeros(10_000), set[int]()
    with saver(tmp_path, window_bytes=window_bytes) as saves:
        for step in (1, 2, 3):
            weight.fill_(step)
            saves.begin_save(step, {"weight": part(weight), "small": torch.full((3,), float(step))}, {"step": step})
            saves.wait_for_copy()
            assert saves.prepared
            _, window = saves.prepared
            assert window.holds_file == (window_bytes is None)
            memory.add(window.memory.data_ptr())
    for step in (1, 2, 3):
        assert all((t == step).all() for t in values(tmp_path, step, 10_000).values())
        assert verify_checkpoint(tmp_path / f"step-{step:08d}")
    assert len(memory) == 1


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path: Path, gate):
    said: list[str] = []
    with saver(tmp_path, said=said) as saves:
        saves.begin_save(1, {"weight": torch.ones(1000), "small": torch.ones(3)}, {"step": 1})
        threading.Timer(0.3, gate.set).start()
        begun = time.monotonic()
        saves.begin_save(2, {"weight": torch.ones(1000), "small": torch.ones(3)}, {"step": 2})
        assert time.monotonic() - begun > 0.2
    assert said == ["step 2: waiting for the checkpoint of step 1, which is still being written"]
    assert [p.name for p in committed_checkpoints(tmp_path)] == ["step-00000002", "step-00000001"]


def test_what_goes_wrong_is_told_at_the_end_of_a_step_and_raised_at_the_next_save(tmp_path: Path, monkeypatch):
    tensors = {"weight": torch.ones(1000), "small": torch.ones(3)}
    saves = saver(tmp_path)
    saves.begin_save(1, tensors, {"step": 1})
    saves.wait_until_written()
    assert saves.save_failures() == []

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_file, "commit_checkpoint", full)
    saves.begin_save(2, tensors, {"step": 2})
    assert saves.thread
    saves.thread.join()
    assert saves.save_failures() == ["the checkpoint of step 2 failed"]
    with pytest.raises(RunFailure, match=f"the checkpoint of step 2 was not written: no space left on {tmp_path}"):
        saves.begin_save(3, tensors, {"step": 3})
    assert require_checkpoint(tmp_path, single_rank_world(), str).state["step"] == 1


def save_without_room(world: World, folder: str) -> tuple[list[str], str]:
    """Rank 1 cannot write."""
    if world.rank == 1:
        save_file.FilePassage.write_file = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # pyright: ignore[reportAttributeAccessIssue]
    saves = saver(folder, world)
    saves.begin_save(1, {f"{n}": torch.ones(100) for n in range(4)}, {"step": 1})
    assert saves.thread
    saves.thread.join()
    failed = saves.save_failures()
    with pytest.raises(RunFailure) as refused:
        saves.wait_until_written()
    return failed, str(refused.value)


def test_a_rank_that_cannot_write_makes_all_ranks_stop_with_its_reason(tmp_path: Path):
    for failed, told in run_ranks(save_without_room, 2, str(tmp_path)):
        assert failed == ["the checkpoint of step 1 failed"]
        assert told.startswith(f"the checkpoint of step 1 was not written: no space left on {tmp_path}")
    assert committed_checkpoints(tmp_path) == []


@pytest.mark.parametrize("window_bytes", [None, 1])
def test_a_save_that_cannot_be_written_keeps_no_update_waiting(window_bytes: int | None, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    saves = saver(tmp_path / "file", window_bytes=window_bytes)
    saves.begin_save(1, {"weight": torch.ones(100_000)}, {"step": 1})
    saves.wait_for_copy()
    with pytest.raises(RunFailure, match="the checkpoint of step 1 was not written"):
        saves.wait_until_written()


def test_through_a_window_an_update_waits_as_long_as_files_are_written_and_is_no_hang(tmp_path: Path, monkeypatch):
    """The phase is one that may be slow: other ranks may have slower disks."""
    phases: list[str] = []
    write = save_file.FilePassage.write_file

    def write_slowly(*args: Any) -> Any:
        time.sleep(0.3)
        phases.append(HERE.phase)
        return write(*args)

    monkeypatch.setattr(save_file.FilePassage, "write_file", write_slowly)
    weight = torch.ones(100_000)
    with saver(tmp_path, window_bytes=1) as saves:
        enter_step(2)
        saves.begin_save(1, {"weight": part(weight), "small": torch.ones(3)}, {"step": 1})
        saves.wait_for_copy()
        weight.zero_()
        assert HERE.phase == "step"
    assert phases == ["checkpoint"]
    assert (values(tmp_path, 1, 100_000)["weight"] == 1).all()


def wait_beside_a_larger_file(world: World, folder: str) -> tuple[int, int]:
    """Where the file of rank 1 alone is larger than the window, and slow: its bytes on the disk when a rank is ready
    for its update, and how often the phase of the rank has changed until then."""
    first, size = ((0, 1000), (1000, 100_000))[world.rank]
    values = torch.ones(size)

    def read_slowly(begin: int, end: int) -> torch.Tensor:
        time.sleep(0.05 * world.rank)
        return values[begin:end]

    held = HeldBox(((first, size),), read_slowly, values.copy_)
    enter_step(2)
    entries = HERE.entries
    with saver(folder, world, window_bytes=50_000) as saves:
        saves.begin_save(1, {"weight": TensorPart((101_000,), torch.float32, [held])}, {"step": 1})
        saves.wait_for_copy()
        written = sum(file.stat().st_size for file in Path(folder).glob("step-*/rank-00001.safetensors"))
    return written, HERE.entries - entries


def test_ranks_whose_files_have_room_wait_with_those_whose_files_have_none(tmp_path: Path):
    """Beyond, they would wait for them in the midst of a step, which has a limit."""
    for written, entries in run_ranks(wait_beside_a_larger_file, 2, str(tmp_path)):
        assert written > 400_000
        assert entries == 2, "into a slow phase, and back"


def save_beside_collectives(world: World, folder: str) -> float:
    """Training's own collectives go on while ranks agree about a checkpoint."""
    weight, total = torch.full((1 << 18,), 1.0 + world.rank), torch.zeros(1)
    mine = [hold_box(((world.rank << 18, 1 << 18),), weight)]
    with saver(folder, world) as saves:
        for step in range(1, 6):
            saves.begin_save(step, {"weight": TensorPart((world.size << 18,), weight.dtype, mine)}, {"step": step})
            for _ in range(20):
                torch.distributed.all_reduce(total.fill_(1.0))
            saves.wait_for_copy()
            weight += 1
    return total.item()


def test_ranks_agree_about_a_checkpoint_beside_the_collectives_of_training(tmp_path: Path):
    assert run_ranks(save_beside_collectives, 2, str(tmp_path)) == [2.0, 2.0]
    found = torch.zeros(2 << 18)
    for step in range(1, 6):
        checkpoint = require_checkpoint(tmp_path / f"step-{step:08d}", single_rank_world(), str)
        load_checkpoint(checkpoint, {"weight": found}, set(), single_rank_world())
        assert (found == torch.tensor([float(step), step + 1.0]).repeat_interleave(1 << 18)).all()


class Split:
    """Flat values whose memory is not what a checkpoint has: fp32 as pairs of 16 bits."""

    dtype = torch.float32

    def __init__(self, values: torch.Tensor):
        self.pairs = values.view(torch.int16).clone()

    def __len__(self) -> int:
        return len(self.pairs) // 2

    def get(self, first: int, last: int) -> torch.Tensor:
        return self.pairs[2 * first : 2 * last].clone().view(torch.float32)

    def put(self, first: int, last: int, values: torch.Tensor) -> None:
        self.pairs[2 * first : 2 * last] = values.contiguous().view(torch.int16)


def part_of_split(state: Split, first: int, last: int) -> TensorPart:
    boxes = flat_range_boxes(first, last, (4, 5))
    return TensorPart((4, 5), torch.float32, [hold_flat_box(box, begin - first, state) for begin, box in boxes])


def test_state_that_lies_otherwise_in_memory_is_saved_and_loaded_by_its_values(tmp_path: Path):
    right = torch.randn(20)
    with saver(tmp_path) as saves:
        saves.begin_save(1, {"main": part_of_split(Split(right), 0, 20)}, {"step": 1})
    some = Split(torch.zeros(14))
    load_checkpoint(
        require_checkpoint(tmp_path, single_rank_world(), str),
        {"main": part_of_split(some, 3, 17)},
        set(),
        single_rank_world(),
    )
    assert torch.equal(some.get(0, 14), right[3:17])
    plain = torch.zeros(4, 5)
    load_checkpoint(require_checkpoint(tmp_path, single_rank_world(), str), {"main": plain}, set(), single_rank_world())
    assert torch.equal(plain.flatten(), right)


def test_values_that_no_rank_holds_are_named_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match='ranks hold 14 of 20 values of "main"'), saver(tmp_path) as saves:
        saves.begin_save(1, {"main": part_of_split(Split(torch.zeros(14)), 3, 17)}, {"step": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window_bytes", [None, 48 << 20])
def test_copies_from_a_gpu_have_the_values_of_the_moment_of_the_save(window_bytes: int | None, tmp_path: Path):
    """Work that was asked for before the save is in it, work from `await_copy` on is not."""
    weight = torch.zeros(1 << 26, device="cuda")
    world = single_rank_world("cuda")
    with saver(tmp_path, world, window_bytes=window_bytes) as saves:
        for step in (1, 2):
            torch.cuda._sleep(100_000_000)
            weight.fill_(step)
            saves.begin_save(step, {"weight": part(weight)}, {"step": step})
            assert saves.prepared
            _, window = saves.prepared
            assert window.memory.is_pinned()
            saves.wait_for_copy()
            weight.fill_(-1.0)
    for step in (1, 2):
        found = torch.zeros(1 << 26, device="cuda")
        load_checkpoint(require_checkpoint(tmp_path / f"step-{step:08d}", world, str), {"weight": found}, set(), world)
        assert (found == step).all()
