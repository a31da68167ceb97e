"""Chat templates: a tokenizer's own Jinja template, rendered in Jinja's sandbox. Only this file uses Jinja. Torch-free.

A template may mark what the assistant says with {% generation %}. In the rendered text these places lie between two
characters that no text may have; they are taken out again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moefold.config.bounded_files import read_bounded_file
from moefold.config.errors import UserError
from moefold.data.chat import BEGIN, END, Chat
from moefold.data.tokenizer import read_token_options, stated_token

OPTIONS_NAME, TEMPLATE_NAME = "tokenizer_config.json", "chat_template.jinja"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Span = tuple[int, int]  # characters of a text: the first, and the one behind the last


class MarkedText(NamedTuple):
    """A text, and the places in it that the assistant says."""

    text: str
    spans: list[Span]


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: what is inside is put between the two characters."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("put_between")
        block = nodes.CallBlock(call, [], [], body)
        return block.set_lineno(line)

    def put_between(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatTemplate:
    """A template with the special tokens that it may name. `marks`: it has {% generation %}."""

    def __init__(
        self,
        source: str,
        tokens: dict[str, str],
        origin: str,
    ):
        self.source = source
        self.tokens = tokens
        environment = make_environment()
        try:
            self.template = environment.from_string(source)
            parsed = environment.parse(source)
        except TemplateError as error:
            raise UserError(f"{origin}: the chat template is not valid Jinja ({error}); mend it") from None
        calls = parsed.find_all(nodes.ExtensionAttribute)
        self.marks = any(call.identifier == GenerationTag.identifier for call in calls)

    def render(self, chat: Chat, asks: bool = False) -> MarkedText:
        """The text of a chat. `asks`: it ends where the assistant is to go on. Refuses with a ValueError."""
        try:
            text = self.template.render(
                messages=chat.messages,
                tools=chat.tools,
                documents=None,
                add_generation_prompt=asks,
                **self.tokens,
            )
        except Exception as error:  # whatever the template's expressions come to
            raise ValueError(f"is refused by the chat template: {str(error)[:200] or type(error).__name__}") from None
        return take_out_marks(text)


def take_out_marks(text: str) -> MarkedText:
    """A text without the two characters, and the places that lay between them."""
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    for number, marked in enumerate(text.split(BEGIN)):
        said, _, rest = marked.rpartition(END) if number else ("", "", marked)
        if said:
            spans.append((length, length + len(said)))
        parts += [said, rest]
        length += len(said) + len(rest)
    return MarkedText("".join(parts), spans)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates are written for: the settings, filters and functions that transformers gives them."""
    extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = today
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def today(form: str) -> str:
    return datetime.now().strftime(form)


def load_template(folder: Path, asker: str, instead: str) -> ChatTemplate:
    """The template beside a tokenizer.json: chat_template.jinja, or the one in tokenizer_config.json. A refusal
    says what needs one, and what to do instead."""
    options_path = folder / OPTIONS_NAME
    options = read_token_options(options_path)
    tokens: dict[str, str] = {}
    for name in TOKEN_NAMES:
        token = stated_token(options, name)
        if isinstance(token, str):
            tokens[name] = token
    path = folder / TEMPLATE_NAME
    if path.is_file():
        source = read_bounded_file(path).decode("utf-8", errors="replace")
        return ChatTemplate(source, tokens, str(path))
    source = stated_template(options.get("chat_template"))
    if source is None:
        raise UserError(
            f"{asker} needs a chat template, but {folder} has no {TEMPLATE_NAME}, and its {OPTIONS_NAME} "
            f"names no chat_template; put one there, or {instead}"
        )
    return ChatTemplate(source, tokens, str(options_path))


def stated_template(stated: Any) -> str | None:
    """The template that tokenizer_config.json has; of several, the one named default."""
    if isinstance(stated, str):
        return stated
    if isinstance(stated, list):
        for entry in stated:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return stated_template(entry.get("template"))
    return None
