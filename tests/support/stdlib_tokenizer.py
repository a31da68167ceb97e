"""The byte-pair vocabulary of Python's standard library, `moefold/data/stdlib_tokenizer/`, made again.

    python -m tests.support.stdlib_tokenizer moefold/data/stdlib_tokenizer/tokenizer.json

The file is a function of the text and of the constants below; the library of CPython 3.11.7 on aarch64 and tokenizers
0.23.3 made the one in the package. Training is on whole documents, in the order of `stdlib_documents`. Ids: 0 is the
end token, 1 to 256 are bytes, and every further id is the next best merge.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moefold.data.documents import stdlib_documents
from moefold.data.tokenizer import STDLIB_ENTRIES

MADE_WITH = ("3.11.7", "0.23.3", "aarch64")  # Python, tokenizers, and the machine, whose build settings are a file
END_TOKEN = "<|endoftext|>"
LONGEST_TOKEN = 16  # characters: long lines of one file are no words
# Words with the space before them, numbers of up to three digits, runs of signs, indentation apart from what follows.
PIECES = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s+"


def train_vocabulary() -> Tokenizer:
    engine = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])  # pyright: ignore[reportAttributeAccessIssue]
    engine.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=STDLIB_ENTRIES,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    engine.train_from_iterator(stdlib_documents(), trainer)
    return engine


def compact_json(engine: Tokenizer) -> str:
    """The tokenizer.json without spaces, each merge as one text: half the size."""
    tree: dict[str, Any] = json.loads(engine.to_str())
    model = tree["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    model["vocab"] = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")) + "\n"


def main(path: str) -> None:
    text = compact_json(train_vocabulary())
    Path(path).write_text(text, encoding="utf-8")
    print(f"wrote {path}: {len(text.encode()) / 2**20:.2f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
