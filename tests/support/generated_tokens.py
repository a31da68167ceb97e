"""A large prepared folder without any text: random bytes as tokens of four bytes, in documents of log-normal length.

python -m tests.support.generated_tokens write FOLDER [BYTES]      # by default 4.3e9 bytes of tokens, 64 shards
python -m tests.support.generated_tokens read FOLDER [SEQUENCES]   # times and memory of opening and reading it
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from moefold.config.run import DataConfig
from moefold.data.document_split import DocumentTokens
from moefold.data.prepare import SHARD_TOKENS
from moefold.data.prepared_corpus import open_prepared
from moefold.data.prepared_folder import SIDES, PreparedIndex, vocabulary_digest, write_index
from moefold.data.sequences import Sequences
from moefold.data.shards import ShardFacts, write_shard
from moefold.data.tokenizer import ByteTokenizer

DTYPE = np.dtype("<u4")
MEAN_LENGTH, SIGMA = 2000, 1.0  # of a document, in tokens
BATCH, LENGTH = 16, 4096
TOKENIZER = ByteTokenizer()


def generated_shard(folder: Path, name: str, tokens: int, seed: int) -> ShardFacts:
    """About so many tokens."""
    chance = np.random.default_rng(seed)
    median = MEAN_LENGTH / np.exp(SIGMA**2 / 2)
    lengths = chance.lognormal(np.log(median), SIGMA, max(2, tokens // MEAN_LENGTH)).astype(int) + 1
    ids = chance.integers(1, 256, lengths.sum(), dtype=np.uint8).astype(DTYPE)
    pieces = np.split(ids, np.cumsum(lengths)[:-1])
    return write_shard(folder, name, list(map(DocumentTokens, pieces)), DTYPE, TOKENIZER.end.id)


def write_generated(out: Path, size: int) -> PreparedIndex:
    """Write about so many bytes of tokens to train on, and a small shard held out."""
    for side in SIDES:
        (out / side).mkdir(parents=True)
    total = size // DTYPE.itemsize
    count = -(-total // SHARD_TOKENS)
    train = [generated_shard(out / "train", f"{i:03d}", total // count, i) for i in range(count)]
    held_out = generated_shard(out / "held_out", "000", 8 * LENGTH, count)
    index = PreparedIndex(
        plan="generated",
        vocabulary=vocabulary_digest(TOKENIZER),
        vocab_size=TOKENIZER.size,
        end=TOKENIZER.end.id,
        held_out=DataConfig().held_out,
        dtype=DTYPE.str,
        sources=("generated",),
        skipped=0,
        shards={"train": tuple(train), "held_out": (held_out,)},
    )
    write_index(out, index)
    return index


def open_generated(folder: Path) -> Sequences:
    data = DataConfig(source="prepared", files=(str(folder),), seq_len=LENGTH, tokenizer="byte")
    return open_prepared(data, TOKENIZER, TOKENIZER.size).train_sequences(data, 0, BATCH)


def memory(name: str) -> str:
    """A line of /proc/self/status, such as VmHWM or RssFile, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return f"{int(lines[name].split()[0]) * 1024 / 1e6:,.0f} MB"


def read_generated(folder: Path, count: int) -> None:
    before = memory("VmHWM")
    begun, used = time.perf_counter(), time.process_time()
    sequences = open_generated(folder)
    for number in range(BATCH):
        sequences.arrays(number)
    wall, cpu = time.perf_counter() - begun, time.process_time() - used
    print(f"opened, {BATCH} of {sequences.windows:,} sequences of {LENGTH}: {wall:.2f} s ({cpu:.2f} s of CPU)")
    for number in range(count):
        sequences.arrays(number)
    wall = time.perf_counter() - begun
    print(f"{count:,} sequences: {wall:.0f} s; most memory {memory('VmHWM')}, {before} before it was opened")
    print(f"mapped files at the end: {memory('RssFile')}")


if __name__ == "__main__":
    action, name, *amount = sys.argv[1:]
    if action == "write":
        written = write_generated(Path(name), int(float(amount[0])) if amount else 4_300_000_000)
        print(f"{written.tokens('train'):,} tokens in {len(written.shards['train'])} shards in {name}")
    else:
        read_generated(Path(name), int(amount[0]) if amount else 20_000)
