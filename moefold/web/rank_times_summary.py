"""Times of a run's ranks in words, from its times.jsonl."""

from __future__ import annotations

from pathlib import Path

from moefold.config.errors import printable_text
from moefold.observe.metrics import Record
from moefold.observe.rank_times import TIMES_FILE
from moefold.web.growing_file import GrowingFile
from moefold.web.page_numbers import as_float_array

MAX_LETTERS = 500


class RankTimesSummary:
    """The last recorded step, and the last rank or link that was slow."""

    def __init__(self, folder: Path):
        self.file = GrowingFile(folder / TIMES_FILE)
        self.last: Record = {}
        self.slow = "no rank was slow"

    def read_new(self) -> None:
        for record in self.file.new_records():
            self.last = record
            if "slow" in record:
                text = str(record["slow"])[:MAX_LETTERS]
                self.slow = printable_text(f"step {record['step']}: {text}")

    def describe(self) -> str:
        """How the last steps of the ranks were spent, on average."""
        compute_R = as_float_array(self.last.get("compute"), 1)
        waiting_R = as_float_array(self.last.get("waiting"), 1)
        communication = as_float_array(self.last.get("communication"), 0)
        if compute_R is None or waiting_R is None or communication is None:
            return "not measured, as of a single rank"
        means = [("compute", compute_R.mean()), ("communication", communication), ("waiting", waiting_R.mean())]
        shown = ", ".join(f"{name} {1e3 * float(seconds):.3g} ms" for name, seconds in means)
        return f"{shown} a step; {self.slow}"
