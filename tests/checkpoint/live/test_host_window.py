"""A checkpoint has the same bytes whatever host memory it goes through, and takes no more than it is given."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import moefold.checkpoint.live.file_passage as passage_file
from moefold.checkpoint.format.boxes import flat_range_boxes, whole_box
from moefold.checkpoint.format.ledger import HASH_PIECE_BYTES, TensorSpec
from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.storage import DISK_BLOCK
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.format.write_plan import RankPlan
from moefold.checkpoint.live.host_window import HostWindow
from moefold.checkpoint.live.load import load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import LogicalTensor, TensorPart, hold_flat_box
from moefold.checkpoint.live.rank_file import RankFile
from moefold.checkpoint.live.save import save_checkpoint
from moefold.layout.axes import World, single_rank_world
from moefold.optim.moments import new_moment
from moefold.shard.block_values import BlockValues
from tests.support.ranks import run_ranks

MIB = 1 << 20
ALONE = single_rank_world()
LARGE = HASH_PIECE_BYTES // 4 + 3  # elements of a tensor in fp32: a piece and a part, many cuts


def save(folder: Path, tensors: dict[str, LogicalTensor], world: World, window: int | None) -> Path:
    return Path(str(save_checkpoint(folder, 1, tensors, {"step": 1}, RetentionPolicy(1), world, window)))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def block_moment(size: int) -> BlockValues:
    moment = new_moment("int8", torch.zeros(size), torch.float32, is_second=False)
    assert isinstance(moment, BlockValues)
    moment.put(0, size, torch.randn(size))
    return moment


def some_tensors() -> dict[str, LogicalTensor]:
    torch.manual_seed(1)
    experts = torch.randn(3, 5, 7001)
    boxes = flat_range_boxes(0, experts.numel(), experts.shape)
    stacked = [hold_flat_box(box, first, experts.flatten()) for first, box in boxes]
    moment = block_moment(100_001)
    held = hold_flat_box(((0, 100_001),), 0, moment)
    return {
        "large": torch.randn(LARGE),
        "experts": TensorPart((3, 5, 7001), torch.float32, stacked, stacked=True),
        "moment": TensorPart((100_001,), torch.float32, [held]),
        "turned": torch.randn(300, 70).t(),
        "half": torch.randn(999).bfloat16(),
        "bytes": torch.arange(77).to(torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }


@pytest.fixture(scope="module")
def by_image(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("image")
    return bytes_of(save(folder, some_tensors(), ALONE, None))


@pytest.mark.parametrize("window", [1, 100_000, 5 * MIB, 1 << 40])
def test_every_file_has_the_same_bytes_through_a_window_of_any_size(
    window: int, by_image: dict[str, bytes], tmp_path: Path
):
    """Also through one that is smaller than a tensor, and than a piece of a digest."""
    path = save(tmp_path, some_tensors(), ALONE, window)
    assert bytes_of(path) == by_image
    assert verify_checkpoint(path).manifest["step"] == 1


@pytest.mark.parametrize("most", [1, 50_000, MIB, 300 * MIB])
def test_a_window_holds_no_more_than_it_is_given_and_cuts_cover_the_file(most: int):
    spec = TensorSpec("float32", (20 * MIB // 4,), False)
    file = RankFile(RankPlan([("weight", whole_box(spec.shape))], {"weight": spec}), 0)
    window = HostWindow(file, most, pinned=False)
    assert len(window.memory) <= max(most, 2 * DISK_BLOCK)
    ends = [cut.end for cut in window.cuts]
    assert [cut.begin for cut in window.cuts] == [0, *ends[:-1]]
    assert ends[-1] == file.size
    assert all(end % DISK_BLOCK == 0 for end in ends[:-1])
    assert window.holds_file == (most > file.size)
    held = min(window.rooms, len(window.cuts))
    addresses = {window.room(number).data_ptr() for number in range(len(window.cuts))}
    assert len(addresses) == held


def peak_beyond_now(begin: bool) -> int:
    """Bytes: the resident memory now, or from then on its peak, as the system counts it."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmRSS:" if begin else "VmHWM:"
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def peaks_of_saves(world: World, folder: str) -> dict[int, int]:
    """Bytes that saves take beside the state, by the bytes of the window; 0: none is given."""
    torch.set_num_threads(1)
    size = MIB
    held = hold_flat_box(((0, size),), 0, block_moment(size))
    moment = TensorPart((size,), torch.float32, [held])
    tensors: dict[str, LogicalTensor] = {"weight": torch.ones(20 * MIB), "moment": moment}
    peaks: dict[int, int] = {}
    for window in (8 * MIB, 0):
        before = peak_beyond_now(begin=True)
        save(Path(folder) / str(window), tensors, world, window or None)
        peaks[window] = peak_beyond_now(begin=False) - before
    return peaks


def test_a_save_takes_the_memory_of_its_window_and_of_what_is_decoded_for_one_cut(tmp_path: Path):
    """84 MiB of values. The system counts the pages; 2 MiB are decoded at a time."""
    (peaks,) = run_ranks(peaks_of_saves, 1, str(tmp_path))
    assert peaks[8 * MIB] < 48 * MIB, peaks
    assert peaks[0] > 84 * MIB, peaks


def save_and_die(world: World, folder: str) -> None:
    """Killed when some cuts have been written."""
    fill = passage_file.HostWindow.fill

    def die_at_the_tenth(window: HostWindow, number: int, *args: object, **more: object) -> None:
        if number == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        fill(window, number, *args, **more)  # pyright: ignore[reportArgumentType]

    passage_file.HostWindow.fill = die_at_the_tenth
    save_checkpoint(Path(folder), 2, {"weight": torch.ones(100_000)}, {"step": 2}, RetentionPolicy(2), world, 1)


def test_a_process_killed_between_two_cuts_leaves_the_checkpoint_before(tmp_path: Path):
    save(tmp_path, {"weight": torch.full((100_000,), 7.0)}, ALONE, 1)
    with pytest.raises(AssertionError, match="it died without a word"):
        run_ranks(save_and_die, 1, str(tmp_path))
    left = tmp_path / "step-00000002.tmp" / "rank-00000.safetensors"
    assert 0 < left.stat().st_size < 400_000
    found = torch.zeros(100_000)
    before = require_checkpoint(tmp_path, ALONE, str)
    load_checkpoint(before, {"weight": found}, set(), ALONE)
    assert before.state["step"] == 1
    assert (found == 7).all()


def test_a_value_that_cannot_be_read_ends_the_save_and_its_threads(tmp_path: Path):
    def refuse(first: int, last: int) -> torch.Tensor:
        raise RuntimeError(f"no values {first} to {last}")

    held = hold_flat_box(((0, 100_000),), 0, torch.zeros(100_000))
    broken = TensorPart((100_000,), torch.float32, [type(held)(held.box, refuse, held.write)])
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no values"):
        save(tmp_path, {"weight": broken}, ALONE, 1)
    assert threading.active_count() == before
