"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moefold.observe.metrics import Record


def describe_record(record: Record) -> str:
    """loss 2.103 | 5.1k tok/s | 0.08 TFLOP/s | imbalance 0.42"""
    parts: list[str] = []
    if "loss" in record:
        parts.append(f"loss {record['loss']:.4f}")
    if "skipped" in record:
        parts.append(f"skipped, loss scale was {compact_number(record['loss_scale'])}")
    if "val_loss" in record:
        parts.append(f"val {describe_validation(record)}")
    if "tokens_per_s" in record:
        parts.append(f"{compact_number(record['tokens_per_s'])} tok/s")
        parts.append(f"{record['tflops']:.3g} TFLOP/s")
    if "slow_rank" in record:
        parts.append(describe_slow_place(record))
    if record.get("max_violation"):  # a model without experts has none
        parts.append(f"imbalance {max(record['max_violation']):.2f}")
    dead = sum(record.get("dead_experts", []))
    if dead:
        parts.append(f"dead experts {dead}")
    dropped = mean(record.get("drop_rate") or [0.0])
    if dropped:
        parts.append(f"dropped {100 * dropped:.3g} %")
    return " | ".join(parts)


def describe_slow_place(record: Record) -> str:
    rank = record["slow_rank"]
    if rank >= 0:
        return f"rank {rank} is slow"
    if "slow_link_first" not in record:
        return "a link is slow"
    return f"link {record['slow_link_first']}-{record['slow_link_second']} is slow"


def describe_validation(record: Record) -> str:
    """Nats per token, and what can be compared between vocabularies: 2.5000 (1.73 bits a byte)"""
    loss = f"{record['val_loss']:.4f}"
    if "val_bits_per_byte" in record:
        loss += f" ({record['val_bits_per_byte']:.3f} bits a byte)"
    return loss


def compact_number(number: float) -> str:
    """12345 -> 12.3k."""
    units = {"G": 1e9, "M": 1e6, "k": 1e3}
    for letter, size in units.items():
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


class SilentProgress:
    """No output: for ranks other than the first."""

    def print_message(self, text: str) -> None: ...

    def show_record(self, record: Record) -> None: ...

    def close(self) -> None: ...


class LineProgress(SilentProgress):
    """One line every so many steps, with the time left."""

    def __init__(self, done: int, total: int, every: int):
        self.first = done
        self.total = total
        self.every = every
        self.begun = time.monotonic()

    def print_message(self, text: str) -> None:
        print(text, flush=True)

    def show_record(self, record: Record) -> None:
        step = record["step"]
        is_due = step % self.every == 0 or step == self.total
        if is_due or "val_loss" in record:
            text = describe_record(record)
            print(f"step {step}/{self.total} | {text}{self.time_left(step)}", flush=True)

    def time_left(self, step: int) -> str:
        """The seconds left at the mean pace so far, as the end of a line; empty before the first step."""
        done = step - self.first
        if done <= 0:
            return ""
        elapsed = time.monotonic() - self.begun
        seconds_left = (self.total - step) * elapsed / done
        return f" | {seconds_left:.0f} s left"


class BarProgress(SilentProgress):
    """A progress bar; validations and messages scroll above it."""

    def __init__(self, done: int, total: int, console: Console):
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=total, completed=done)
        self.progress.start()

    def print_message(self, text: str) -> None:
        console = self.progress.console
        console.print(text, markup=False, highlight=False)

    def show_record(self, record: Record) -> None:
        step = record["step"]
        if "val_loss" in record:
            self.print_message(f"step {step}: validation loss {describe_validation(record)}")
        text = describe_record(record)
        self.progress.update(self.task, completed=step, description=text)

    def close(self) -> None:
        self.progress.stop()


def make_progress(first_rank: bool, done: int, total: int, every: int) -> SilentProgress:
    if not first_rank:
        return SilentProgress()
    console = Console()
    if console.is_terminal:
        return BarProgress(done, total, console)
    return LineProgress(done, total, every)
