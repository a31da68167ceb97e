"""Scores of texts: perplexity is that of transformers over the same tokens, and the built-in task can be learnt."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.config.errors import UserError
from moefold.train.text_model import TextModel, load_text_model
from moefold.train.text_scores import CHOICES, line_questions, score_files, score_questions, text_windows
from tests.support.hf_models import CASES, make, save
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

FP32 = 1e-6  # transformers has rotary tables and router scores in fp32 in any model
TEXT = "what is the name of the one that is here? " * 4


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("published")
    kind, options = CASES["mixtral"]
    theirs = make(kind, **{**options, "vocab_size": ENTRIES, "num_hidden_layers": 1}).double().eval()
    save(theirs, path)
    write_tokenizer(path)
    return theirs, path


def load(path: Path, longest: int) -> TextModel:
    return load_text_model(path, device="cpu", precision="fp64", seq_len=longest)


def test_perplexity_is_that_of_transformers_and_every_token_is_predicted_once(
    published: tuple[Any, Path], tmp_path: Path
):
    theirs, path = published
    (tmp_path / "text.txt").write_text(TEXT)
    for longest in (64, 16):
        text_model = load(path, longest)
        ids = list(text_model.encode(TEXT))
        windows = text_windows(text_model, TEXT)
        assert [token for window in windows for token in window.tokens] == ids[1:]
        score = score_files(text_model, str(tmp_path / "text.txt"), batch=2)
        nats = 0.0
        for context, tokens in windows:
            piece = torch.tensor([[*context, *tokens]])
            with torch.no_grad():
                nats += theirs(piece, labels=piece).loss.item() * len(tokens)
        assert score.nats == pytest.approx(nats, rel=FP32)
        assert score.tokens == len(ids) - 1
        assert score.perplexity == pytest.approx(math.exp(nats / score.tokens))
        assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT.encode()))


def test_a_text_of_a_run_stands_behind_the_end_of_another(published: tuple[Any, Path]):
    text_model = replace(load(published[1], 64), is_published=False)
    (window,) = text_windows(text_model, "what")
    assert list(window.context) == [text_model.tokenizer.end.id]
    assert list(window.tokens) == text_model.tokenizer.encode("what").tolist()


def test_an_empty_file_is_refused(published: tuple[Any, Path], tmp_path: Path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="empty"):
        score_files(load(published[1], 64), str(tmp_path / "empty.txt"), batch=2)


def test_questions_are_the_same_every_time_and_have_one_right_line():
    questions = line_questions(40)
    assert questions == line_questions(40)
    assert len(questions) == 40
    for question in questions:
        assert len(set(question.choices)) == CHOICES
    answers = [question.answer for question in questions]
    assert set(answers) == set(range(CHOICES)), "the place of the right line tells nothing"


def test_questions_are_answered_by_the_likeliest_line(published: tuple[Any, Path]):
    text_model = load(published[1], 128)
    questions = line_questions(5)
    score = score_questions(text_model, questions, batch=4)
    assert score.questions == 5
    alone = [score_questions(text_model, [question], batch=1) for question in questions]
    assert sum(each.right for each in alone) == score.right
    assert sum(each.right_by_byte for each in alone) == score.right_by_byte
