"""Log of spikes: `spikes.jsonl` in a run's folder, with the documents of each sequence of the batch."""

from __future__ import annotations

from itertools import chain

from moefold.observe.metrics import JsonLines
from moefold.train.assemble import Run
from moefold.train.step import StepReport, sequences_of_step

SPIKES_FILE = "spikes.jsonl"
SHOWN_DOCUMENTS = 3


class SpikeLog:
    def __init__(self, run: Run, last_kept: int):
        self.run = run
        self.lines = JsonLines(run.out / SPIKES_FILE, last_kept)

    def write(self, report: StepReport) -> str:
        """Log the documents of a step's batch. Returns some of them in words."""
        sequences = sequences_of_step(self.run, report.number)
        by_sequence = self.run.loader.documents_of(sequences)
        listed = [
            {"number": number, "documents": documents} for number, documents in zip(sequences, by_sequence, strict=True)
        ]
        skipped = report.is_skipped_spike
        self.lines.write({"step": report.number, "skipped": skipped, "sequences": listed})
        found = list(dict.fromkeys(chain.from_iterable(by_sequence)))
        shown = ", ".join(f"{document.source} {document.number}" for document in found[:SHOWN_DOCUMENTS])
        return (
            f"{len(found)} documents, listed in {SPIKES_FILE}: {shown}{', ...' if len(found) > SHOWN_DOCUMENTS else ''}"
        )

    def close(self) -> None:
        self.lines.close()
