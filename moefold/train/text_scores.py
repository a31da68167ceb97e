"""Scores of a text model: perplexity of files, and a choice among lines of code that needs no download."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.documents import file_entries, stdlib_documents
from moefold.data.entries import BadEntry
from moefold.generate.likelihood import Continuation
from moefold.generate.next_logits import TokenIds
from moefold.train.text_model import TextModel

CONTEXT_LINES = 12
CHOICES = 4
QUESTIONS = 200
LEAST_LETTERS = 12  # of a line that is asked for
HELD_OUT = 10  # every tenth file


@dataclass(frozen=True)
class TextScore:
    """Of all texts of a name: the tokens that were predicted, the bytes of the texts, and the sum of losses in nats."""

    name: str
    tokens: int
    size: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        bits = self.nats / math.log(2)
        return bits / self.size

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)


def score_files(text_model: TextModel, name: str, batch: int) -> TextScore:
    """Of a file, or of all files of a folder that can be read."""
    windows: list[Continuation] = []
    size = 0
    for text in texts_of(name):
        windows += text_windows(text_model, text)
        size += len(text.encode())
    tokens = sum(len(window.tokens) for window in windows)
    if not tokens:
        raise UserError(f"{name} has no token to predict; expected a text of at least two tokens")
    found = text_model.score(windows, batch)
    nats = -math.fsum(each.log_p for each in found)
    return TextScore(name, tokens, size, nats)


def texts_of(name: str) -> Iterator[str]:
    data = DataConfig(source="files", files=(name,))
    for entry in file_entries(data):
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, BadEntry):
            raise UserError(entry.problem)
        else:
            raise UserError(f"{name} holds token ids; expected text, whose bytes can be counted")


def text_windows(text_model: TextModel, text: str) -> list[Continuation]:
    """All tokens but the first, in pieces of the longest sequence. A piece begins with the last token of the one
    before: each token is predicted once."""
    ids = text_ids(text_model, text)
    longest = text_model.longest
    starts = range(0, len(ids) - 1, longest)
    return [Continuation(ids[i : i + 1], ids[i + 1 : i + 1 + longest]) for i in starts]


def text_ids(text_model: TextModel, text: str) -> TokenIds:
    """A text as the model met texts: behind the end of another in a run's training data, where that ends documents."""
    ids = list(text_model.encode(text))
    if text_model.is_published:
        return ids
    return [text_model.tokenizer.end.id, *ids]


# ---- lines of the standard library ----


@dataclass(frozen=True)
class LineQuestion:
    """Lines of code, and lines of which one follows them in the file: the one of number `answer`."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceScore:
    """Questions answered rightly, by the likeliest line and by the likeliest for its bytes."""

    questions: int
    right: int
    right_by_byte: int


def line_questions(count: int = QUESTIONS) -> list[LineQuestion]:
    """From every tenth file of Python's standard library. Wrong lines are of the same file."""
    chance = random.Random(1)
    files = islice(stdlib_documents(), 0, None, HELD_OUT)
    questions: list[LineQuestion] = []
    for text in files:
        lines = text.splitlines(keepends=True)
        worth_asking = [i for i in range(CONTEXT_LINES, len(lines)) if len(lines[i].strip()) >= LEAST_LETTERS]
        different = sorted({lines[i] for i in worth_asking})
        if len(different) < 4 * CHOICES:
            continue
        for i in chance.sample(worth_asking, 4):
            others = [line for line in different if line != lines[i]]
            choices = [*chance.sample(others, CHOICES - 1), lines[i]]
            chance.shuffle(choices)
            context = "".join(lines[i - CONTEXT_LINES : i])
            questions.append(LineQuestion(context, tuple(choices), choices.index(lines[i])))
    return questions[:count]


def score_questions(text_model: TextModel, questions: Sequence[LineQuestion], batch: int) -> ChoiceScore:
    continuations: list[Continuation] = []
    for question in questions:
        context = text_ids(text_model, question.context)
        for choice in question.choices:
            tokens = text_model.tokenizer.encode(choice).tolist()
            continuations.append(Continuation(context, tokens[: text_model.longest]))
    found = text_model.score(continuations, batch)
    right = right_by_byte = 0
    for number, question in enumerate(questions):
        first = number * CHOICES
        log_p = [each.log_p for each in found[first : first + CHOICES]]
        per_byte = [p / len(line.encode()) for p, line in zip(log_p, question.choices, strict=True)]
        right += log_p.index(max(log_p)) == question.answer
        right_by_byte += per_byte.index(max(per_byte)) == question.answer
    return ChoiceScore(len(questions), right, right_by_byte)
