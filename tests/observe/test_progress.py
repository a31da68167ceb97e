"""What a run says while it runs."""

import io
import re

import pytest
from rich.console import Console

from moefold.observe.progress import (
    BarProgress,
    LineProgress,
    SilentProgress,
    compact_number,
    describe_record,
    make_progress,
)

RECORD = {"loss": 2.1034, "tokens_per_s": 5100.0, "tflops": 0.08, "max_violation": [0.1, 0.42], "dead_experts": [0, 0]}


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def shown_steps(lines: list[str]) -> list[int]:
    return [int(re.match(r"step (\d+)/", line)[1]) for line in lines]  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize(
    ("total", "every", "steps"), [(10, 4, [4, 8, 10]), (10, 1, list(range(1, 11))), (10, 50, [10]), (12, 6, [6, 12])]
)
def test_lines_come_every_so_many_steps_and_at_the_end(
    total: int, every: int, steps: list[int], capsys: pytest.CaptureFixture[str]
):
    progress = LineProgress(0, total, every)
    for step in range(1, total + 1):
        progress.show_record({"step": step, "loss": 1.0})
    assert shown_steps(printed(capsys)) == steps


def test_a_validation_is_always_shown(capsys: pytest.CaptureFixture[str]):
    progress = LineProgress(0, 100, 10)
    progress.show_record({"step": 0, "val_loss": 5.5})
    progress.show_record({"step": 7, "loss": 2.0, "val_loss": 2.5})
    first, second = printed(capsys)
    assert first == "step 0/100 | val 5.5000"
    assert second.startswith("step 7/100 | loss 2.0000 | val 2.5000 | ")


def test_bits_per_byte_stand_beside_nats(capsys: pytest.CaptureFixture[str]):
    progress = LineProgress(0, 100, 10)
    progress.show_record({"step": 0, "val_loss": 5.5, "val_bits_per_byte": 2.6454})
    assert printed(capsys) == ["step 0/100 | val 5.5000 (2.645 bits a byte)"]


def test_the_time_left_is_by_the_pace_since_this_start(capsys: pytest.CaptureFixture[str]):
    """Resumed at 50 of 100: after ten steps in two seconds, forty are left, eight seconds."""
    progress = LineProgress(50, 100, 10)
    progress.begun -= 2.0
    progress.show_record({"step": 60, "loss": 1.0})
    assert printed(capsys) == ["step 60/100 | loss 1.0000 | 8 s left"]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]):
    progress = make_progress(False, 0, 10, 1)
    assert type(progress) is SilentProgress
    progress.print_message("hello")
    progress.show_record({"step": 1, "loss": 1.0})
    progress.close()
    assert printed(capsys) == []


def test_without_a_terminal_the_first_rank_prints_lines(capsys: pytest.CaptureFixture[str]):
    progress = make_progress(True, 0, 10, 5)
    assert isinstance(progress, LineProgress)
    progress.print_message("hello")
    progress.show_record({"step": 5, **RECORD})
    progress.close()
    said, line = printed(capsys)
    assert said == "hello"
    assert line.startswith("step 5/10 | loss 2.1034 | 5.1k tok/s | 0.08 TFLOP/s | imbalance 0.42 | ")


def test_on_a_terminal_there_is_a_bar_and_messages_with_brackets_come_out_as_they_are():
    out = io.StringIO()
    bar = BarProgress(0, 10, Console(file=out, force_terminal=True, width=120))
    bar.print_message("a sample: x[0] = [bold]")
    bar.show_record({"step": 4, "loss": 1.25, "val_loss": 2.5})
    bar.close()
    assert "a sample: x[0] = [bold]" in out.getvalue()
    assert "step 4: validation loss 2.5000" in out.getvalue()
    assert "4/10" in out.getvalue()
    assert "loss 1.2500" in out.getvalue()


def test_dead_experts_are_told_only_when_there_are_any():
    assert "dead" not in describe_record(RECORD)
    assert describe_record({**RECORD, "dead_experts": [1, 2]}).endswith("dead experts 3")
    assert describe_record({}) == ""


def test_dropped_choices_are_told_only_when_there_are_any():
    assert "dropped" not in describe_record({**RECORD, "drop_rate": [0.0, 0.0]})
    assert describe_record({**RECORD, "drop_rate": [0.062, 0.0]}).endswith("imbalance 0.42 | dropped 3.1 %")
    assert describe_record({**RECORD, "drop_rate": [1.0]}).endswith("dropped 100 %")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (3e6, "3M"), (2.5e9, "2.5G")]
)
def test_numbers_are_short(number: float, text: str):
    assert compact_number(number) == text
