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
from moefold.data.prepared_folder import read_index
from moefold.data.samples import PreferenceReader
from moefold.data.sequences import Sequences
from moefold.data.tokenizer import load_tokenizer
from moefold.layout.labels import IGNORE_INDEX
from tests.support.prepared import opened, prepared
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

BYTES = load_tokenizer("byte", 256)
SEQ = 24


def read(fields: dict[str, Any]) -> tuple[str, list[int]]:
    (document,) = PreferenceReader(BYTES, SEQ, "byte").documents(fields)
    assert document.mask is not None
    return BYTES.decode(document.ids.tolist()), np.flatnonzero(document.mask).tolist()


def test_responses_and_their_end_tokens_are_trained_and_prompts_are_not():
    text, trained = read({"prompt": "ab", "chosen": "cde", "rejected": "f"})
    assert text == "abcdeabf"  # end tokens are not shown
    assert trained == [2, 3, 4, 5, 8, 9]  # c d e and the end token, f and the end token behind the document


USER = {"role": "user", "content": "red"}
STOP, GO = ({"role": "assistant", "content": content} for content in ("stop", "go"))
CHATS: dict[str, dict[str, Any]] = {
    "prompt and responses": {"prompt": [USER], "chosen": [STOP], "rejected": [GO]},
    "whole chats": {"prompt": "red", "chosen": [USER, STOP], "rejected": [USER, GO]},
    "a text and messages": {"prompt": "red", "chosen": [STOP], "rejected": [GO]},
    "messages and texts": {"messages": [USER], "chosen": "stop", "rejected": "go"},
    "turns": {
        "conversations": [{"from": "human", "value": "red"}],
        "chosen": {"from": "gpt", "value": "stop"},
        "rejected": {"from": "gpt", "value": "go"},
    },
}
BAD_CHATS: dict[str, dict[str, Any]] = {
    "other messages before the last": {"chosen": [USER, STOP], "rejected": [{**USER, "content": "blue"}, GO]},
    "the last of user": {"chosen": [STOP, USER], "rejected": [STOP, USER]},
    "has 1 messages": {"chosen": [STOP], "rejected": [GO]},
    'has NoneType in "rejected"': {"chosen": [USER, STOP]},
    "the same text": {"prompt": [USER], "chosen": [STOP], "rejected": [STOP]},
}


def test_chats_are_compared_by_their_last_answers(tmp_path: Path):
    """All forms of a record give one document; the template's text of each chat, answers and ends trained."""
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path, ENTRIES)
    reader = PreferenceReader(tokenizer, 99, path)
    engine = pytest.importorskip("tokenizers").Tokenizer.from_file(path)
    prompt = engine.encode("<s><|user|>red</s><|assistant|>", add_special_tokens=False).ids
    answers = [engine.encode(f"{text}</s>", add_special_tokens=False).ids for text in ("stop", "go")]
    ids = [*prompt, *answers[0], *prompt, *answers[1]]
    trained = [False] * len(prompt) + [True] * len(answers[0]) + [False] * len(prompt) + [True] * len(answers[1])
    for fields in CHATS.values():
        (document,) = reader.documents(fields)
        assert [*document.ids.tolist(), tokenizer.end.id] == ids
        assert document.mask is not None
        assert document.mask.tolist() == trained
        assert rejected_half(document.mask) == len(prompt) + len(answers[0])
    # Another end token than that of a turn is trained behind both answers, so that halves have one border.
    (document,) = PreferenceReader(load_tokenizer(path, ENTRIES, "<s>"), 99, path).documents(CHATS["turns"])
    assert rejected_half(document.mask) == len(prompt) + len(answers[0]) + 1
    for problem, fields in BAD_CHATS.items():
        with pytest.raises(ValueError, match=problem):
            reader.documents(fields)
    with pytest.raises(UserError, match="a preference of messages needs a tokenizer with a chat template"):
        PreferenceReader(BYTES, SEQ, "byte").documents(CHATS["turns"])


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
    settings: dict[str, Any] = {"format": "preferences", "seq_len": SEQ, "held_out": 0.2}
    packed: dict[str, Any] = {**settings, "attend": "document", "packing": "best_fit"}
    data = DataConfig(source="files", files=(str(path),), tokenizer="byte", **packed)
    assert prepared(tmp_path / "out", path, **settings) == read_index(tmp_path / "out")
    from_shards, of_shards = opened(tmp_path / "out", **packed)
    rows: list[Sequences] = []
    for corpus, source in ((load_corpus(data, BYTES, 256), data), (from_shards, of_shards)):
        rows += [corpus.packed_sequences(source, 1, 4), corpus.held_out_sequences(source)]
    for sequences in rows:
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


def test_a_folder_of_pairs_is_not_compared_and_another_length_or_template_prepares_other_preferences(tmp_path: Path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "ab", "response": "cd"}\n' * 40)
    prepared(tmp_path / "out", pairs, format="pairs")
    with pytest.raises(UserError, match=r"was prepared of samples; prepare it again with --data\.format preferences"):
        opened(tmp_path / "out", format="preferences")
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path, ENTRIES)
    identities = [PreferenceReader(tokenizer, longest, path).identity for longest in (8, 9, 9)]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    identities.append(PreferenceReader(tokenizer, 9, path).identity)
    assert [identities.index(identity) for identity in identities] == [0, 1, 1, 3]


def test_documents_without_two_responses_are_refused():
    with pytest.raises(UserError, match="has no two responses behind prompts"):
        rejected_half(np.array([False, True, True]))
