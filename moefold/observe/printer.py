"""Printers: functions that take a line of text for the user."""

from __future__ import annotations

from collections.abc import Callable

Printer = Callable[[str], None]


def print_line(text: str) -> None:
    print(text, flush=True)


def print_nothing(_: str) -> None: ...
