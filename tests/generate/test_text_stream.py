"""Text as it comes: the parts are the whole text, with whole characters, and end before a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from moefold.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from moefold.generate.text_stream import TextStream

TEXT = "déf f(x):\n    return 'naïve' + \"日本語 🙂\"  # x\n\nclass A:"
END = 0


def tokenizers() -> list[Tokenizer]:
    return [ByteTokenizer(), load_tokenizer("stdlib", 600)]


def stream_parts(
    tokenizer: Tokenizer, prompt: str, text: str, stops: Sequence[str] = ()
) -> tuple[list[str], TextStream]:
    """The parts of a text whose tokens come one by one behind a prompt."""
    ids = tokenizer.encode(prompt).tolist()
    stream = TextStream(tokenizer, ids, [END], stops)
    parts = [stream.add(token) for token in tokenizer.encode(text).tolist()]
    parts.append(stream.finish())
    return parts, stream


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=["byte", "stdlib"])
def test_parts_are_the_text_in_whole_characters(tokenizer: Tokenizer):
    parts, stream = stream_parts(tokenizer, "# 日\n", TEXT)
    assert "".join(parts) == TEXT == stream.text
    assert not any("\ufffd" in part for part in parts)
    assert sum(map(bool, parts)) > 10  # it does not wait for the end


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=["byte", "stdlib"])
def test_text_ends_before_the_first_stop_string_and_none_of_it_is_shown(tokenizer: Tokenizer):
    chance = random.Random(1)
    for _ in range(60):
        first = chance.randrange(len(TEXT) - 1)
        stops = [TEXT[first : first + chance.randrange(1, 6)], "\n\nclas?", "retur_"]
        parts, stream = stream_parts(tokenizer, "x", TEXT, stops)
        expected = TEXT[: TEXT.index(stops[0])]
        assert "".join(parts) == expected == stream.text, stops
        assert stream.is_done


def test_what_only_began_a_stop_string_is_shown_in_the_end():
    parts, _ = stream_parts(ByteTokenizer(), "", "abc STO", ["STOP"])
    assert parts[-1] == "STO"
    assert "".join(parts) == "abc STO"


def test_an_end_token_ends_the_text_and_later_tokens_add_nothing():
    stream = TextStream(ByteTokenizer(), [97], [END], [])
    shown = [stream.add(token) for token in (98, 99, END, 100)]
    assert shown == ["b", "c", "", ""]
    assert stream.is_done
    assert stream.finish() == ""


def test_an_unfinished_character_is_shown_as_such_in_the_end():
    stream = TextStream(ByteTokenizer(), [97], [END], [])
    assert stream.add(0xE6) == ""
    assert stream.finish() == "\ufffd"
