"""What Weights & Biases keeps of a run is what the run recorded, read from its file of an offline run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moefold.observe.trackers import TrackedRun
from moefold.observe.wandb_tracker import WandbTracker

BLOCK = 32768  # bytes
FILE_HEADER = 7
CHUNK_HEADER = 7  # four bytes of checksum, two of length, one of kind
WHOLE, LAST = 1, 4  # kinds of chunks; others are the first or a middle chunk of a message


def messages(raw: bytes) -> Iterator[bytes]:
    """The messages of a log of chunks in blocks, as LevelDB has it."""
    place = FILE_HEADER
    message = b""
    while place + CHUNK_HEADER <= len(raw):
        left = BLOCK - place % BLOCK
        if left < CHUNK_HEADER:
            place += left
            continue
        length = int.from_bytes(raw[place + 4 : place + 6], "little")
        kind = raw[place + 6]
        place += CHUNK_HEADER
        message += raw[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield message
            message = b""


def history(folder: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for raw in messages(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_records_are_kept_and_a_resumed_run_goes_on_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'moefold[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = TrackedRun(tmp_path, "project", {"train": {"steps": 2}})
    ids: list[str] = []
    for step in (1, 2):
        tracker = WandbTracker(tracked)
        ids.append(tracker.run.id)
        tracker.write({"step": step, "loss": 3.0 - step, "imbalance": [0.5, 1.5]})
        tracker.close()
    assert ids[0] == ids[1]
    found = history(tmp_path)
    assert [(row["_step"], row["loss"], row["imbalance/layer_1"]) for row in found] == [(1, 2.0, 1.5), (2, 1.0, 1.5)]
