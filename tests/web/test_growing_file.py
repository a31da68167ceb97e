"""Each record of a file that grows is read once, whenever it is read; a file written anew is known."""

import json
from pathlib import Path

import pytest

from moefold.observe.metrics import JsonLines
from moefold.web.growing_file import GrowingFile

LINES = [{"step": step, "text": "x" * (step % 7)} for step in range(40)]


def steps_of(file: GrowingFile) -> list[int]:
    return [record["step"] for record in file.new_records()]


@pytest.mark.parametrize("piece", [7, 29, 64, 10_000])
def test_each_record_is_read_once_however_the_bytes_arrive(piece: int, tmp_path: Path):
    content = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    path = tmp_path / "metrics.jsonl"
    file, found = GrowingFile(path), list[int]()
    assert steps_of(file) == []
    with path.open("ab", buffering=0) as writer:
        for start in range(0, len(content), piece):
            writer.write(content[start : start + piece])
            assert not file.has_changed_before()
            found += steps_of(file)
    assert found == [line["step"] for line in LINES]


def test_what_is_no_record_is_passed_over_and_a_last_line_without_an_end_waits(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('junk\n{"step": 1}\n{"step": 2, "loss": 3')
    file = GrowingFile(path)
    assert steps_of(file) == [1]
    with path.open("a") as writer:
        writer.write('.5}\n{"step": 3}')
    assert steps_of(file) == [2, 3], "a whole record is one, with an end of line or without"


def test_a_resumed_run_that_drops_lines_has_changed_and_one_that_drops_none_has_not(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    file = GrowingFile(path)
    steps_of(file)
    same = JsonLines(path, keep_through=39)
    assert not file.has_changed_before()
    same.close()
    resumed = JsonLines(path, keep_through=20)
    assert file.has_changed_before()
    for step in range(21, 50):
        resumed.write({"step": step, "text": "another"})
    assert file.has_changed_before(), "also when it has grown beyond what was read"
    resumed.close()
    path.unlink()
    assert not file.has_changed_before(), "what is absent has not changed"
