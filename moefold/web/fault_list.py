"""Faults and restarts of a run, from its faults.jsonl and restarts.jsonl, the last few in words."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from moefold.config.errors import printable_text
from moefold.observe.metrics import Record
from moefold.web.growing_file import GrowingFile
from moefold.web.page_numbers import JsonObject

SHOWN_FAULTS = 20
SHOWN_CAUSES = 5
MAX_LETTERS = 500  # of a fault

ToldFault = tuple[int, str]


class FaultList:
    def __init__(self, folder: Path):
        self.faults = GrowingFile(folder / "faults.jsonl")
        self.restarts = GrowingFile(folder / "restarts.jsonl")
        self.told: deque[ToldFault] = deque(maxlen=SHOWN_FAULTS)
        self.causes: deque[str] = deque(maxlen=SHOWN_CAUSES)
        self.restart_count = 0
        self.count = 0  # of all lines

    @property
    def files(self) -> tuple[GrowingFile, GrowingFile]:
        return self.faults, self.restarts

    def read_new(self) -> None:
        for record in self.faults.new_records():
            self.add_fault(record, f"{record.get('cause')}: {record.get('what')}")
        for record in self.restarts.new_records():
            self.restart_count += "restart" in record
            self.causes.append(printable_text(f"step {record['step']}: {record.get('cause')}"))
            self.add_fault(record, describe_restart(record))

    def add_fault(self, record: Record, text: str) -> None:
        self.count += 1
        self.told.append((record["step"], printable_text(text[:MAX_LETTERS])))

    def describe_restarts(self) -> str:
        """How often the run was started again after a fault, and the causes of the last few."""
        shown = "; ".join(self.causes)
        return f"{self.restart_count} ({shown})" if shown else "none"

    def fault_data(self) -> list[JsonObject]:
        return [{"step": step, "text": text} for step, text in self.told]


def describe_restart(record: Record) -> str:
    when = record.get("time")
    if "restart" in record:
        return f"{when}: restart {record['restart']} from {record.get('resume')}, since: {record.get('cause')}"
    return f"{when}: gave up, {record.get('gave_up')}; {record.get('cause')}"
