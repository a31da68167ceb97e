"""The vocabulary that a run trains at its start (`data.tokenizer trained`): tokenizer.json in the run's folder, above
its checkpoints, where whoever reads a checkpoint finds it."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

from moefold.checkpoint.format.retention import newest_checkpoint
from moefold.checkpoint.format.storage import StoragePath, parse_storage_path
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.comm.consensus import result_of_rank_zero
from moefold.config.bounded_files import read_bounded_file
from moefold.config.errors import UserError
from moefold.config.run import TRAINED, Config
from moefold.data.shards import write_durably
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from moefold.data.tokenizer_engine import open_engine
from moefold.data.trained_vocabulary import end_token_of, train_vocabulary
from moefold.layout.axes import World
from moefold.observe.printer import Printer

VOCABULARY_FILE = "tokenizer.json"
OPTIONS_FILE = "tokenizer_config.json"


def open_run_tokenizer(config: Config, world: World, out: Path, vocabulary: str | None) -> Tokenizer:
    """The tokenizer of a run. One that is to be trained is that of `vocabulary`; None: rank 0 trains it now, and writes
    nothing."""
    data = config.data
    entries = config.model.vocab
    if data.tokenizer != TRAINED:
        return load_tokenizer(data.tokenizer, entries, data.end_token)
    train = partial(train_vocabulary, data, entries)
    text = vocabulary or result_of_rank_zero(train, world)
    engine = open_engine(str(out / VOCABULARY_FILE), text)
    return HuggingFaceTokenizer(engine, out, data.end_token)


def keep_vocabulary(config: Config, world: World, out: Path, earlier: str | None, say: Printer) -> str | None:
    """The vocabulary of a run, on all ranks, with its file in the run's folder: that of an earlier run whose weights
    are the start, also the run itself, or one that is trained now. None where none is trained."""
    if config.data.tokenizer != TRAINED:
        return None
    place = partial(place_vocabulary, config, out, earlier, say)
    return run_on_rank_zero(place, world, out)


def place_vocabulary(config: Config, out: Path, earlier: str | None, say: Printer) -> str:
    own = out / VOCABULARY_FILE
    held = read_vocabulary(own) if own.is_file() else None
    text = train_aloud(config, say) if earlier is None else vocabulary_of_run(earlier)
    if text != held:
        write_vocabulary(out, text, end_token_of(config.data))
    return text


def vocabulary_of_run(earlier: str) -> str:
    run = parse_storage_path(earlier)
    found = run / VOCABULARY_FILE  # of a run whose checkpoints may be in memory alone
    if not found.is_file():
        found = vocabulary_of_checkpoint(newest_checkpoint(run))
    if found is None:
        raise UserError(
            f"data.tokenizer = trained, but {earlier} has no {VOCABULARY_FILE}: its weights belong to another "
            "vocabulary; set data.tokenizer to theirs"
        )
    return read_vocabulary(found)


def train_aloud(config: Config, say: Printer) -> str:
    begin = time.perf_counter()
    text = train_vocabulary(config.data, config.model.vocab)
    seconds = time.perf_counter() - begin
    entries = len(json.loads(text)["model"]["vocab"])
    say(f"vocabulary: {entries:,} entries, trained on text of {config.data.source} in {seconds:.1f} s")
    return text


def read_vocabulary(path: StoragePath) -> str:
    return read_bounded_file(path).decode("utf-8", errors="replace")


def write_vocabulary(out: Path, text: str, end_token: str) -> None:
    """Both files of a tokenizer, as transformers reads them."""
    options = {"eos_token": end_token, "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in ((OPTIONS_FILE, json.dumps(options)), (VOCABULARY_FILE, text)):
        write_durably(out / name, content.encode())


def vocabulary_of_checkpoint(checkpoint: StoragePath) -> StoragePath | None:
    """The file of the vocabulary that the run of a checkpoint has trained; None where there is none above it."""
    run = checkpoint.resolve().parent.parent
    file = run / VOCABULARY_FILE
    return file if file.is_file() else None
