"""metrics.jsonl survives crashes and resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moefold.observe.metrics import BLOCK_BYTES, JsonLines, TensorBoard, last_step, read_records


def write(path: Path, steps: range, keep_through: int = 0) -> None:
    sink = JsonLines(path, keep_through)
    for step in steps:
        sink.write({"step": step, "loss": 1 / (1 + step)})
    sink.close()


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_records_come_back_as_they_were_written(tmp_path: Path):
    sink = JsonLines(tmp_path / "m.jsonl", 0)
    records = [{"step": 0, "val_loss": 5.5}, {"step": 1, "loss": 0.1 + 0.2, "counts": [1, 2, 3], "text": "été\n"}]
    for record in records:
        sink.write(record)
    sink.close()
    assert read_records(tmp_path / "m.jsonl") == records
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_continuing_keeps_lines_through_a_step_and_drops_later_ones(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 11))
    write(path, range(7, 9), keep_through=6)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_fresh_start_drops_everything_but_step_zero(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    write(path, range(5))
    write(path, range(0), keep_through=0)
    assert steps_in(path) == [0]


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_last_line_cut_off_anywhere_is_dropped_and_the_file_goes_on_whole(tmp_path: Path, cut: int):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    path.write_text(path.read_text()[:-cut])
    kept = steps_in(path)
    assert kept == ([1, 2] if cut > 1 else [1, 2, 3])
    write(path, range(3, 5), keep_through=2)
    assert steps_in(path) == [1, 2, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines()), "no broken line is left behind"


@pytest.mark.parametrize("junk", [b"5\n", b'{"loss": 1}\n', b"\xff\xfe"])
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, junk: bytes):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + junk)
    write(path, range(2, 3), keep_through=1)
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize("keep_through", [-1, 0, 1, 700, 1999, 2000, 5000])
@pytest.mark.parametrize("longest", [1, 3 * BLOCK_BYTES])
def test_a_long_file_is_continued_behind_any_step_with_the_bytes_before_untouched(
    tmp_path: Path, keep_through: int, longest: int
):
    path = tmp_path / "m.jsonl"
    sizes = [longest if step % 700 == 1 else 40 for step in range(2001)]
    lines = [b'{"step": %d, "text": "%s"}\n' % (step, b"x" * size) for step, size in enumerate(sizes)]
    path.write_bytes(b"".join(lines))
    assert last_step(path) == 2000
    write(path, range(3000, 3001), keep_through)
    kept = b"".join(lines[: keep_through + 1])
    assert path.read_bytes() == kept + b'{"step": 3000, "loss": %s}\n' % repr(1 / 3001).encode()


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_continuing_a_file_with_another_name_leaves_the_other_as_it_was(tmp_path: Path, link: Callable[..., None]):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 6))
    other = tmp_path / "other.jsonl"
    link(path, other)
    write(other, range(3, 5), keep_through=2)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert steps_in(other) == [1, 2, 3, 4]


def test_a_long_last_line_that_is_no_record_takes_no_time(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' * 20_000 + bytes(16 << 20))
    begun = time.monotonic()
    assert last_step(path) == 1
    assert time.monotonic() - begun < 5


def test_a_missing_file_has_no_lines(tmp_path: Path):
    assert read_records(tmp_path / "absent.jsonl") == []


def test_every_line_is_on_disk_before_the_next_step(tmp_path: Path):
    """The writer kills itself without closing: what it wrote is there."""
    path = tmp_path / "m.jsonl"
    code = (
        "import os, pathlib, signal, sys; from moefold.observe.metrics import JsonLines\n"
        f"sink = JsonLines(pathlib.Path({str(path)!r}), 0); sink.write({{'step': 1}}); sink.write({{'step': 2}})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert steps_in(path) == [1, 2]


def test_tensorboard_gets_numbers_and_one_curve_for_each_layer_of_a_list(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path, 0)
    for step in (1, 2):
        sink.write({"step": step, "loss": 3.0 - step, "imbalance": [0.5, 1.5]})
    sink.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "imbalance/layer_0", "imbalance/layer_1"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [event.value for event in found.Scalars("imbalance/layer_1")] == [1.5, 1.5]
