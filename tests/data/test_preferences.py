"""Preferences: both responses of a record are one document, whose halves see nothing of each other, in any bin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import load_corpus
from moefold.data.preferences import rejected_half
from moefold.data.samples import PreferenceReader
from moefold.data.tokenizer import load_tokenizer
from moefold.layout.labels import IGNORE_INDEX

BYTES = load_tokenizer("byte", 256)
SEQ = 24


def read(fields: dict[str, Any]) -> tuple[str, list[int]]:
    (document,) = PreferenceReader(BYTES, SEQ).documents(fields)
    assert document.mask is not None
    return BYTES.decode(document.ids.tolist()), np.flatnonzero(document.mask).tolist()


def test_responses_and_their_end_tokens_are_trained_and_prompts_are_not():
    text, trained = read({"prompt": "ab", "chosen": "cde", "rejected": "f"})
    assert text == "abcdeabf"  # end tokens are not shown
    assert trained == [2, 3, 4, 5, 8, 9]  # c d e and the end token, f and the end token behind the document


BAD = {
    "expected a text in": {"prompt": "a", "chosen": "b"},
    'an empty "prompt"': {"prompt": "", "chosen": "b", "rejected": "c"},
    "the same text": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "preferences are never cut": {"prompt": "a" * 10, "chosen": "bbb", "rejected": "c"},
}


@pytest.mark.parametrize("problem", BAD)
def test_a_malformed_record_is_refused_with_what_is_wrong(problem: str):
    with pytest.raises(ValueError, match=problem):
        read(BAD[problem])


def test_bins_hold_whole_preferences_of_two_documents_each(tmp_path: Path):
    path = tmp_path / "preferences.jsonl"
    records = [{"prompt": "ab"[: 1 + i % 2], "chosen": "c" * (1 + i % 4), "rejected": "dd"} for i in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(source="files", files=(str(path),), format="preferences", tokenizer="byte", seq_len=SEQ)
    data = DataConfig(**{**vars(data), "attend": "document", "packing": "best_fit", "held_out": 0.2})
    corpus = load_corpus(data, BYTES, 256)
    for sequences in (corpus.packed_sequences(data, 1, 4), corpus.held_out_sequences(data)):
        for number in range(2):
            tokens, labels, begins, filled = sequences.arrays(number)
            assert begins is not None
            firsts = np.unique(begins[:filled]).tolist()
            assert len(firsts) >= 2
            for response, (first, end) in enumerate(zip(firsts, [*firsts[1:], filled], strict=True)):
                shown = labels[first:end]
                answer = BYTES.decode(shown[shown != IGNORE_INDEX].tolist())
                assert answer.strip("\0") in ({"dd"} if response % 2 else {"c", "cc", "ccc", "cccc"})
                assert BYTES.decode(tokens[first : first + 1].tolist()) == "a"


def test_documents_without_two_responses_are_refused():
    with pytest.raises(UserError, match="has no two responses behind prompts"):
        rejected_half(np.array([False, True, True]))
