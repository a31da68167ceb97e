"""Samples of which answers alone are trained: chats, pairs of prompt and response, preferences. Torch-free.

A chat is rendered by the tokenizer's chat template. What {% generation %} marks is trained. Without such marks an
answer is what a rendering has behind the rendering of the messages before it, which ends where the assistant is to go
on. Where renderings of fewer messages are no beginnings of the whole one, each answer is a sample of its own, with the
messages before it as the template shows them then.

A pair is the tokens of the prompt and those of the response, each encoded by itself, as the prompt is when the model is
asked. A preference has two such pairs with one prompt, or two chats that differ in their last answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.chat import ASSISTANT, Chat, compares_chats, read_chat, read_compared_chats
from moefold.data.document_split import DocumentTokens
from moefold.data.entries import SampleReader
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer

if TYPE_CHECKING:
    from moefold.data.chat_template import ChatTemplate, MarkedText

Half = tuple[np.ndarray, np.ndarray]  # the tokens of a prompt with a response, and what is trained of them and the end


def sample_reader(data: DataConfig, tokenizer: Tokenizer) -> SampleReader | None:
    """What makes documents of records, as `data.format` says; None for text."""
    if data.format == "pairs":
        return PairReader(tokenizer)
    if data.format == "preferences":
        return PreferenceReader(tokenizer, data.seq_len, data.tokenizer)
    if data.format == "chat":
        return ChatReader(tokenizer, data.tokenizer)
    return None


class PairReader:
    """Records with a prompt and a response."""

    identity = "pairs"

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def documents(self, fields: dict[str, Any]) -> list[DocumentTokens]:
        prompt = self.tokenizer.encode(text_field(fields, "prompt"))
        response = self.tokenizer.encode(text_field(fields, "response"))
        if not len(response):
            raise ValueError('has an empty "response"; expected a text, of which the model learns')
        ids = np.concatenate((prompt, response))
        positions = np.arange(len(ids) + 1)
        return [DocumentTokens(ids, positions >= len(prompt))]


def text_field(fields: Mapping[str, Any], name: str, kind: str = "pairs") -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        names = ", ".join(map(str, fields))
        raise ValueError(f'has the fields {names}; expected a text in "{name}", as data.format = {kind} says')
    return text


class PreferenceReader:
    """Records with a prompt, a chosen and a rejected response, as texts or as messages. Both are one document, so that
    they stay together: the prompt with the chosen response, the end token, the prompt with the rejected response
    (data/preferences.py). `name` is that of the tokenizer, whose template decides the tokens if it has one."""

    def __init__(self, tokenizer: Tokenizer, longest: int, name: str):
        self.tokenizer = tokenizer
        self.longest = longest
        self.name = name
        try:
            template = self.chats.identity
        except UserError:
            template = "texts"
        self.identity = f"preferences of at most {longest} tokens, {template}"

    @cached_property
    def chats(self) -> ChatReader:
        return ChatReader(self.tokenizer, self.name, "a preference of messages", "its prompt and responses to texts")

    def documents(self, fields: dict[str, Any]) -> list[DocumentTokens]:
        halves = self.chat_halves(fields) if compares_chats(fields) else self.text_halves(fields)
        (chosen, chosen_mask), (rejected, rejected_mask) = halves
        if np.array_equal(chosen, rejected):
            raise ValueError('has the same text in "chosen" and "rejected"; expected two, of which one is preferred')
        end = np.array([self.tokenizer.end.id])
        ids = np.concatenate((chosen, end, rejected))
        if len(ids) > self.longest:
            raise ValueError(
                f"has {len(ids)} tokens in both responses with their prompts; expected at most data.seq_len = "
                f"{self.longest}, since preferences are never cut"
            )
        return [DocumentTokens(ids, np.concatenate((chosen_mask, rejected_mask)))]

    def text_halves(self, fields: dict[str, Any]) -> list[Half]:
        prompt = self.encode(fields, "prompt")
        halves: list[Half] = []
        for name in ("chosen", "rejected"):
            ids = np.concatenate((prompt, self.encode(fields, name)))
            halves.append((ids, np.arange(len(ids) + 1) >= len(prompt)))
        return halves

    def chat_halves(self, fields: dict[str, Any]) -> list[Half]:
        """Trained is the last answer to its end, and the end token behind it."""
        halves: list[Half] = []
        for chat in read_compared_chats(fields):
            last = len(chat.messages) - 1
            document = self.chats.encode(mark_answer(self.chats.template, chat, last))
            assert document.mask is not None
            document.mask[-1] = True
            halves.append((document.ids, document.mask))
        return halves

    def encode(self, fields: dict[str, Any], name: str) -> np.ndarray:
        ids = self.tokenizer.encode(text_field(fields, name, "preferences"))
        if not len(ids):
            raise ValueError(f'has an empty "{name}"; expected a text')
        return ids


class ChatReader:
    """Records with messages, for the chat template of a tokenizer; `name` is that of the tokenizer. `asker` needs one,
    and `instead` could be set."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        asker: str = "data.format = chat",
        instead: str = "data.format to pairs",
    ):
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"{asker} needs a tokenizer with a chat template, but data.tokenizer = {name}; "
                f"set data.tokenizer to a tokenizer.json that has one beside it, or {instead}"
            )
        self.tokenizer = tokenizer
        self.template = open_template(tokenizer, asker, f"set {instead}")
        source = self.template.source.encode()
        tokens = sorted(self.template.tokens.items())
        self.identity = f"chat {hashlib.sha256(source).hexdigest()} {tokens}"

    def documents(self, fields: dict[str, Any]) -> list[DocumentTokens]:
        chat = read_chat(fields)
        samples = mark_answers(self.template, chat)
        return [self.encode(sample) for sample in samples]

    def encode(self, sample: MarkedText) -> DocumentTokens:
        """The tokens of a text. Trained are those with a character of what is marked. The end token behind the sample
        is trained where the text itself ends with it inside of a mark."""
        ids, offsets = self.tokenizer.encode_with_offsets(sample.text)
        begins, ends = offsets.T
        mask = np.zeros(len(ids) + 1, dtype=bool)
        for first, behind in sample.spans:
            inside = np.flatnonzero((begins < behind) & (ends > first))
            if len(inside):
                mask[inside[0] : inside[-1] + 1] = True
        if not mask.any():
            raise ValueError("has no token to train on; expected an answer of the assistant with a text")
        if ids[-1] == self.tokenizer.end.id:
            return DocumentTokens(ids[:-1], mask[:-1])
        return DocumentTokens(ids, mask)


def open_template(tokenizer: HuggingFaceTokenizer, asker: str, instead: str) -> ChatTemplate:
    try:
        from moefold.data.chat_template import load_template
    except ImportError:
        raise UserError(
            f"{asker} needs the jinja2 library, which is not installed; run pip install 'moefold[hf]'"
        ) from None
    return load_template(tokenizer.folder, asker, instead)


# Answers.


def mark_answers(template: ChatTemplate, chat: Chat) -> list[MarkedText]:
    """The texts to train on, one or one for each answer, with the answers marked."""
    whole = template.render(chat)
    if template.marks:
        return [whole]
    answers: list[MarkedText] = []
    for number, message in enumerate(chat.messages):
        if message["role"] == ASSISTANT:
            answer = mark_answer(template, chat, number)
            answers.append(answer)
    if not all(whole.text.startswith(answer.text) for answer in answers):
        return answers
    spans = [span for answer in answers for span in answer.spans]
    return [whole._replace(spans=spans)]


def mark_answer(template: ChatTemplate, chat: Chat, number: int) -> MarkedText:
    """The text up to an answer, which is marked: the message with that number."""
    asked = template.render(chat.before(number), asks=True).text
    asked_and_answered = template.render(chat.before(number + 1))
    text = asked_and_answered.text
    if not text.startswith(asked):
        raise ValueError(
            f"cannot be masked: the chat template writes what is before message {number + 1} differently when the "
            "answer follows; expected a template with {% generation %} marks, or whose prompt stays as it is"
        )
    span = (len(asked), len(text))
    return asked_and_answered._replace(spans=[span])
