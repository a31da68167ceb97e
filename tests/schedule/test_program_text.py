"""The text form of programs."""

import pytest

from moefold.schedule import program_text
from moefold.schedule.passes import pair_forward_with_backward
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.schedule_error import ScheduleError


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_reads_back_to_the_same_program(name: str):
    program = build_program(name, 3, SCHEDULES[name].least_vpp, 5)
    for each in (program, pair_forward_with_backward(program)):
        assert program_text.read_program(program_text.write_program(each, "a title")) == each


def test_the_form_is_the_documented_one():
    written = program_text.write_program(build_program("1f1b", 2, 1, 2), "1F1B, 2 ranks, 2 microbatches")
    body = "".join(line.strip() + "\n" for line in (program_text.__doc__ or "").split("\n\n")[1].splitlines())
    assert written == body


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("rank 1: F0.0", "line 1 starts with 'rank 1: F0.0'; expected `rank 0:`"),
        ("rank 0: F0.0\nF1.0", "line 2 starts with 'F1.0'; expected `rank 1:`"),
        ("rank 0: F0.0 B0.0", "line 1: cannot read 'B0.0'; expected F, D or W"),
        ("rank 0: F0.0 D0.0++W0.0", "line 1: cannot read ''"),
        ("# all\n\nrank 0: F0", "line 3: cannot read 'F0'"),
        ("rank 0: F٣.0", "cannot read"),
    ],
)
def test_what_cannot_be_read_is_told_by_line_and_word(bad: str, says: str):
    with pytest.raises(ScheduleError) as told:
        program_text.read_program(bad)
    assert says in str(told.value)
