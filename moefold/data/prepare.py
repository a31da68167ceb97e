"""Preparation of data: sources are tokenized once, in parallel, into a prepared folder. Torch-free.

Sources are cut into parts of about 64 MiB, whatever the number of workers; a part becomes one or more shards of each
side. The record of a finished part is written behind its shards, so that an interrupted preparation goes on with the
parts that have none.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from moefold.config.errors import RunFailure, UserError
from moefold.config.run import DataConfig
from moefold.data.document_split import DocumentTokens, smallest_dtype, split_documents
from moefold.data.documents import named_files
from moefold.data.entries import BadEntries, SampleReader, entry_documents
from moefold.data.prepared_folder import (
    INDEX_NAME,
    SIDES,
    PreparedIndex,
    content_digest,
    read_index,
    save_tokenizer,
    vocabulary_digest,
    write_index,
)
from moefold.data.readers import Piece, cut_file, field_to_read, read_piece
from moefold.data.samples import sample_reader
from moefold.data.shards import ShardFacts, write_durably, write_shard
from moefold.data.tokenizer import Tokenizer, load_tokenizer

PART_BYTES = 1 << 26
SHARD_TOKENS = 1 << 24
SHARD_DOCUMENTS = 1 << 18
PROGRESS_SECONDS = 2.0
PLAN_NAME, RECORDS = "plan.json", "parts"
FOLDERS_OF_FORMATS = {"text": "text", "preferences": "preferences"}  # what a folder of a `data.format` holds

Part = list[Piece]
SideShards = dict[str, list[ShardFacts]]
Printer = Callable[[str], None]


@dataclass(frozen=True)
class PrepareJob:
    """What every part needs: the folder to write to, the settings, and the vocabulary of a packaged tokenizer. The
    bytes of all sources stand for their tokens where documents are cut that are long beside the text."""

    out: Path
    data: DataConfig
    vocab: int
    source_bytes: int = 0

    def load_tokenizer(self) -> Tokenizer:
        data = self.data
        return load_tokenizer(data.tokenizer, self.vocab, data.end_token)


class PartRecord(NamedTuple):
    """What a finished part has written and left out."""

    shards: SideShards
    skipped: list[str]


def prepare_data(job: PrepareJob, workers: int, say: Printer) -> PreparedIndex:
    """Tokenize `data.files` into the folder, or continue where an earlier preparation was interrupted."""
    tokenizer = job.load_tokenizer()
    samples = sample_reader(job.data, tokenizer)
    parts = plan_parts(job.data)
    plan = plan_digest(job, tokenizer, samples, parts)
    sizes = map(part_bytes, parts)
    job = replace(job, source_bytes=sum(sizes))
    claim_folder(job.out, plan)
    if (job.out / INDEX_NAME).exists():
        say(f"{job.out} is prepared already")
        return read_index(job.out)
    save_tokenizer(job.out, tokenizer)
    missing = missing_parts(job.out, len(parts))
    done = len(parts) - len(missing)
    if done:
        say(f"continuing: {done} of {len(parts)} parts are done")
    progress = PrepareProgress(parts, missing, say)
    workers = min(workers, len(missing))
    if workers > 1:
        prepare_in_parallel(job, parts, missing, workers, progress)
    else:
        for number in missing:
            part = parts[number]
            prepare_part(job, number, part, tokenizer)
            progress.finish(number)
    return finish_folder(job, tokenizer, plan, len(parts))


def missing_parts(out: Path, parts: int) -> list[int]:
    """The parts that have no record yet."""
    missing: list[int] = []
    for number in range(parts):
        path = record_path(out, number)
        if not path.exists():
            missing.append(number)
    return missing


def plan_parts(data: DataConfig) -> list[Part]:
    """The pieces of all files in order, joined to parts."""
    parts: list[Part] = []
    filled = PART_BYTES
    for name in data.files:
        for path in named_files(name):
            if not path.is_file():
                raise UserError(f"no file {path}; expected a file or folder to prepare")
            for piece in cut_file(path, PART_BYTES):
                if filled >= PART_BYTES:
                    parts.append([])
                    filled = 0
                parts[-1].append(piece)
                filled += piece_bytes(piece)
    return parts


def piece_bytes(piece: Piece) -> int:
    """The bytes of a piece; of some row groups, those of a whole part."""
    if piece.end is None:
        return piece.path.stat().st_size
    if piece.path.suffix == ".jsonl":
        return piece.end - piece.begin
    return PART_BYTES


def part_bytes(part: Part) -> int:
    return sum(map(piece_bytes, part))


def plan_digest(
    job: PrepareJob,
    tokenizer: Tokenizer,
    samples: SampleReader | None,
    parts: list[Part],
) -> str:
    """A digest of all that decides the tokens: files as they are now, tokenizer, settings."""
    pieces: list[dict[str, object]] = []
    for part in parts:
        for piece in part:
            facts = piece.path.stat()
            resolved = piece.path.resolve()
            identity: dict[str, object] = {"path": str(resolved)}
            identity["range"] = (piece.begin, piece.end)
            identity["bytes"] = facts.st_size
            identity["changed"] = facts.st_mtime_ns
            pieces.append(identity)
    settings: dict[str, object] = {"pieces": pieces}
    settings["vocabulary"] = vocabulary_digest(tokenizer)
    for key in ("text_key", "held_out", "skip_bad"):
        settings[key] = getattr(job.data, key)
    if samples is not None:
        settings["samples"] = samples.identity
    return content_digest(settings)


def claim_folder(out: Path, plan: str) -> None:
    """Make the folder, or make sure that it holds this preparation."""
    path = out / PLAN_NAME
    if path.exists():
        if json.loads(path.read_text()) != plan:
            raise UserError(
                f"{out} holds data of other sources, settings or versions of the files; "
                "choose another --out, or remove the folder"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and holds no prepared data; choose another --out")
    for side in SIDES:
        (out / side).mkdir(parents=True)
    (out / RECORDS).mkdir()
    write_durably(path, json.dumps(plan).encode())


def record_path(out: Path, number: int) -> Path:
    return out / RECORDS / f"{number:05d}.json"


# One part.


def prepare_part(
    job: PrepareJob,
    number: int,
    part: Part,
    tokenizer: Tokenizer,
) -> None:
    """Read, tokenize, split and write the documents of a part, then its record."""
    bad = BadEntries(job.data.skip_bad)
    writer = PartWriter(job, number, tokenizer)
    samples = sample_reader(job.data, tokenizer)
    field = field_to_read(job.data)
    for piece in part:
        for entry in read_piece(piece, field):
            for document in entry_documents(entry, tokenizer, bad, samples):
                writer.add(document)
    writer.flush()
    record = PartRecord(writer.shards, bad.problems)
    text = json.dumps(record._asdict())
    write_durably(record_path(job.out, number), text.encode())


class PartWriter:
    """Collects documents of a part and writes them as shards of both sides."""

    def __init__(self, job: PrepareJob, number: int, tokenizer: Tokenizer):
        self.job = job
        self.number = number
        self.tokenizer = tokenizer
        self.dtype = smallest_dtype(tokenizer.size)
        self.documents: list[DocumentTokens] = []
        self.tokens = 0
        self.written = 0
        self.shards: SideShards = {side: [] for side in SIDES}

    def add(self, document: DocumentTokens) -> None:
        stored = replace(document, ids=document.ids.astype(self.dtype))
        self.documents.append(stored)
        self.tokens += len(stored) + 1
        has_documents = len(self.documents) >= SHARD_DOCUMENTS
        if has_documents or self.tokens >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self.documents:
            return
        job = self.job
        name = f"{self.number:05d}-{self.written:03d}"
        end = self.tokenizer.end.id
        sides = split_documents(self.documents, job.data.held_out, self.tokenizer, job.source_bytes)
        for side, documents in zip(SIDES, sides, strict=True):
            if documents:
                folder = job.out / side
                facts = write_shard(folder, name, documents, self.dtype, end)
                self.shards[side].append(facts)
        self.documents = []
        self.tokens = 0
        self.written += 1


# Many parts at once.


class PrepareProgress:
    """Prints how much is done, at most every two seconds."""

    def __init__(self, parts: list[Part], missing: list[int], say: Printer):
        self.sizes = {number: part_bytes(parts[number]) for number in missing}
        self.total = sum(self.sizes.values())
        self.say = say
        self.done = 0
        self.began = self.last = time.monotonic()

    def finish(self, number: int) -> None:
        self.done += self.sizes.pop(number)
        now = time.monotonic()
        is_early = now - self.last < PROGRESS_SECONDS
        if self.sizes and is_early:
            return
        self.last = now
        seconds = max(now - self.began, 1e-9)
        speed = self.done / seconds
        missing = self.total - self.done
        left = missing / max(speed, 1)
        done = self.done / 1e6
        total = self.total / 1e6
        rate = speed / 1e6
        self.say(f"prepared {done:,.0f} of {total:,.0f} MB | {rate:,.1f} MB/s | {left:.0f} s left")


def prepare_in_parallel(
    job: PrepareJob,
    parts: list[Part],
    missing: list[int],
    workers: int,
    progress: PrepareProgress,
) -> None:
    """Prepare parts in processes of their own. The first refusal stops all that have not begun."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=begin_worker, initargs=(job,))
    running: dict[Future[None], int] = {}
    try:
        for number in missing:
            part = parts[number]
            future = pool.submit(prepare_part_here, number, part)
            running[future] = number
        for future in as_completed(running):
            future.result()
            number = running[future]
            progress.finish(number)
    except BrokenProcessPool:
        raise RunFailure(
            "a worker ended without a word, perhaps for lack of memory; the same command goes on where it stopped, "
            f"with fewer --workers than {workers}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


WORKER: dict[str, Any] = {}  # of a worker process: its job and its tokenizer


def begin_worker(job: PrepareJob) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has one core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets workers finish the parts that they have begun
    WORKER.update(job=job, tokenizer=job.load_tokenizer())


def prepare_part_here(number: int, part: Part) -> None:
    prepare_part(WORKER["job"], number, part, WORKER["tokenizer"])


# The end.


def finish_folder(job: PrepareJob, tokenizer: Tokenizer, plan: str, parts: int) -> PreparedIndex:
    """Write the index of all parts. From now on the folder can be trained on."""
    shards: SideShards = {side: [] for side in SIDES}
    skipped: list[str] = []
    for record in read_records(job.out, parts):
        skipped += record.skipped
        for side in SIDES:
            shards[side] += record.shards[side]
    if not shards["train"]:
        raise UserError(f"{', '.join(job.data.files)}: no document could be read; expected text to train on")
    if skipped:
        lines = "".join(f"{line}\n" for line in skipped)
        write_durably(job.out / "skipped.txt", lines.encode())
    stored: dict[str, tuple[ShardFacts, ...]] = {}
    for side, facts in shards.items():
        stored[side] = tuple(facts)
    dtype = smallest_dtype(tokenizer.size)
    index = PreparedIndex(
        plan=plan,
        vocabulary=vocabulary_digest(tokenizer),
        vocab_size=tokenizer.size,
        end=tokenizer.end.id,
        held_out=job.data.held_out,
        dtype=dtype.str,
        sources=job.data.files,
        skipped=len(skipped),
        shards=stored,
        holds=FOLDERS_OF_FORMATS.get(job.data.format, "samples"),
    )
    write_index(job.out, index)
    for number in range(parts):
        path = record_path(job.out, number)
        path.unlink()
    (job.out / RECORDS).rmdir()
    return index


def read_records(out: Path, parts: int) -> Iterator[PartRecord]:
    for number in range(parts):
        path = record_path(out, number)
        content = json.loads(path.read_text())
        shards: SideShards = {}
        for side, listed in content["shards"].items():
            shards[side] = [ShardFacts(*facts) for facts in listed]
        skipped = content["skipped"]
        yield PartRecord(shards, skipped)
