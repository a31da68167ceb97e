"""What `moefold data` does with prepared folders: it writes, describes, verifies, shows and exports. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.data.megatron import write_megatron
from moefold.data.prepare import PrepareJob, Printer, prepare_data
from moefold.data.prepared_folder import SIDES, PreparedIndex, read_index
from moefold.data.shards import Shard
from moefold.data.tokenizer import choose_tokenizer

SHOWN_PROBLEMS = 5
PREFERENCE_KEYS = " --data.format preferences --data.attend document --data.packing best_fit --train.objective dpo"


def prepare_sources(
    config: Config,
    sources: tuple[str, ...],
    out: Path,
    workers: int,
    say: Printer,
) -> None:
    """Tokenize sources into a folder, with so many workers; 0: one for each CPU core."""
    data = replace(config.data, source="files", files=sources)
    tokenizer = choose_tokenizer(data, config.model.vocab)
    data = replace(data, tokenizer=tokenizer)
    job = PrepareJob(out, data, config.model.vocab)
    index = prepare_data(job, workers or os.cpu_count() or 1, say)
    describe_folder(out, say)
    if index.skipped:
        list_skipped(out, index.skipped, say)
    further = PREFERENCE_KEYS if index.holds == "preferences" else ""
    say(f"train on it with: moefold train --data.source prepared --data.files {out}{further}")


def list_skipped(out: Path, count: int, say: Printer) -> None:
    listing = out / "skipped.txt"
    say(f"left out {count} entries that cannot be read, listed in {listing}:")
    lines = listing.read_text().splitlines()
    for line in lines[:SHOWN_PROBLEMS]:
        say(f"  {line}")
    if count > SHOWN_PROBLEMS:
        say(f"  and {count - SHOWN_PROBLEMS} more")


def describe_folder(folder: Path, say: Printer) -> None:
    index = read_index(folder)
    kind = "preferences" if index.holds == "preferences" else "documents"
    tokens = f"{index.tokens('train'):,} tokens in {index.documents('train'):,} {kind}"
    held_out = f"{index.tokens('held_out'):,} held out in {index.documents('held_out'):,}"
    shards = [*index.shards["train"], *index.shards["held_out"]]
    size = index.token_type.itemsize
    say(f"{folder}: {tokens}, {held_out}; {len(shards)} shards, {size} bytes a token")


def verify_folder(folder: Path, say: Printer) -> None:
    """Read every shard. All damaged ones are named."""
    index = read_index(folder)
    problems: list[str] = []
    for side in SIDES:
        for facts in index.shards[side]:
            try:
                shard = Shard(folder / side, facts, index.token_type, index.has_masks)
                shard.check_all()
            except UserError as damaged:
                problems += damaged.problems
    if problems:
        raise UserError(*problems)
    say(f"sound: {folder}")


def export_side(folder: Path, side: str, prefix: Path, say: Printer) -> None:
    """Write the documents of a side as Megatron's PREFIX.bin and PREFIX.idx."""
    index = read_index(folder)
    if index.has_masks:
        raise UserError(
            f"{folder} has masks of trained tokens, which Megatron's files do not hold; "
            "expected a folder prepared with data.format = text"
        )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    documents = side_documents(folder, index, side)
    count = write_megatron(prefix, documents, index.vocab_size)
    say(f"wrote {count:,} documents to {prefix}.bin and {prefix}.idx")


def side_documents(folder: Path, index: PreparedIndex, side: str) -> Iterator[np.ndarray]:
    for facts in index.shards[side]:
        shard = Shard(folder / side, facts, index.token_type)
        yield from shard.documents()
