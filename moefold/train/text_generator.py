"""A text generator: texts behind prompts, by a text model on one rank, or on several with the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.config.errors import UserError
from moefold.data.chat import Chat
from moefold.data.samples import open_template
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer, read_token_options
from moefold.generate.decode import check_prompts, decode_tokens, tokens_that_fit
from moefold.generate.next_logits import NextLogits, TokenIds, model_logits
from moefold.generate.sampling import Sampling
from moefold.generate.text_stream import TextStream
from moefold.train.evaluate import next_logits_of
from moefold.train.text_model import TextModel, load_text_model

if TYPE_CHECKING:
    from moefold.data.chat_template import ChatTemplate

ShowText = Callable[[int, str], None]  # the number of a prompt, and text that follows it
DEFAULT_TOKENS = 200
END_OF_BEGINNING = "<end of the beginning of an answer>"


@dataclass(frozen=True)
class GenerationRequest:
    """Texts to continue, or with `chat` to answer, by up to `tokens` tokens, until one of the `stops` comes."""

    prompts: Sequence[str]
    tokens: int = DEFAULT_TOKENS
    stops: Sequence[str] = ()
    chat: bool = False
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self):
        if self.tokens < 1:
            raise UserError(f"tokens = {self.tokens} is not legal; expected at least 1, such as {DEFAULT_TOKENS}")
        if not all(self.stops):
            raise UserError("a stop string is empty; expected at least one character")


class TextGenerator:
    """`path` is a run, one of its checkpoints or a Hugging Face folder, and options are those of `load_text_model`; or
    a text model that is loaded already."""

    def __init__(self, path: str | Path | TextModel, **options: Any):
        self.text_model = path if isinstance(path, TextModel) else load_text_model(path, **options)
        self.tokenizer = self.text_model.tokenizer
        self.longest = self.text_model.longest
        self.ends = end_token_ids(self.tokenizer)
        self.source = next_logits_of_text_model(self.text_model)

    def generate(
        self,
        prompts: str | Sequence[str],
        tokens: int = DEFAULT_TOKENS,
        stop: Sequence[str] = (),
        chat: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """The text behind each prompt. `sampling`: temperature, top_k, top_p, min_p, seed (generate/sampling.py)."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        stops = [stop] if isinstance(stop, str) else stop
        request = GenerationRequest(texts, tokens, stops, chat, Sampling(**sampling))
        return self.answer(request)

    def answer(self, request: GenerationRequest, show: ShowText | None = None) -> list[str]:
        """The text behind each prompt; `show` gets each part as it comes."""
        return self.continue_ids(self.encode_prompts(request), request, show)

    def continue_ids(
        self, prompts: Sequence[TokenIds], request: GenerationRequest, show: ShowText | None = None
    ) -> list[str]:
        """As `answer`, behind tokens in place of the request's prompts."""
        streams = [TextStream(self.tokenizer, prompt, self.ends, request.stops) for prompt in prompts]
        count = tokens_that_fit(prompts, self.longest, request.tokens)
        vocab = self.tokenizer.size
        show = show or show_nothing
        for tokens in decode_tokens(self.source, prompts, request.sampling, count, vocab):
            for number, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                show(number, stream.add(token))
            if all(stream.is_done for stream in streams):
                break
        for number, stream in enumerate(streams):
            show(number, stream.finish())
        return [stream.text for stream in streams]

    def encode_prompts(self, request: GenerationRequest) -> list[TokenIds]:
        encode = self.encode_chat if request.chat else self.text_model.encode
        prompts = [encode(text) for text in request.prompts]
        check_prompts(prompts, self.longest, self.text_model.model.model.vocab)
        return prompts

    def encode_chat(self, text: str) -> TokenIds:
        """A user's message in the chat template, up to where the assistant goes on."""
        message = {"role": "user", "content": text}
        rendered = render_messages(self.tokenizer, [message])
        return self.tokenizer.encode(rendered).tolist()


def next_logits_of_text_model(text_model: TextModel) -> NextLogits:
    """On a rank that holds the whole model with a recorder, where there is a GPU."""
    executor = text_model.executor
    world = executor.world
    holds_all_layers = world.dp.size == world.size
    holds_all_experts = world.ep_etp.size == 1
    if holds_all_layers and holds_all_experts:
        return model_logits(text_model.model)
    return next_logits_of(executor)


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            "a chat needs the chat template of a tokenizer.json, and this run is trained on bytes; leave out --chat"
        )
    return open_template(tokenizer, "a chat", "leave out --chat")


def render_messages(tokenizer: Tokenizer, messages: list[dict[str, Any]], continues: bool = False) -> str:
    """Messages in the tokenizer's chat template, up to where the assistant goes on: behind the last of them, or, with
    `continues`, in it."""
    if continues:
        return render_begun_answer(tokenizer, messages)
    return render_chat(tokenizer, messages, asks=True)


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], asks: bool) -> str:
    template = chat_template_of(tokenizer)
    try:
        return template.render(Chat(messages), asks=asks).text
    except ValueError as error:
        raise UserError(f"the prompt {error}") from None


def render_begun_answer(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    """Messages up to the end of the last one, which a mark shows. A template that strips messages takes the mark's last
    space away, and would take the message's."""
    *earlier, last = messages
    begun = str(last["content"])
    marked = {**last, "content": begun + END_OF_BEGINNING + " "}
    text = render_chat(tokenizer, [*earlier, marked], asks=False)
    before, mark, behind = text.rpartition(END_OF_BEGINNING)
    if not mark:
        raise UserError(
            f"the chat template leaves out {json.dumps(begun[:80])}, with which an answer is to begin; take that from "
            "the task, or leave out --chat"
        )
    return before if behind.startswith(" ") else before.rstrip()


def show_nothing(_: int, text: str) -> None: ...


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a text: the tokenizer's, and all that generation_config.json names."""
    ids = [tokenizer.end.id]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        options = read_token_options(tokenizer.folder / "generation_config.json")
        stated = options.get("eos_token_id")
        listed = stated if isinstance(stated, list) else [stated]
        ids += [each for each in listed if isinstance(each, int)]
    return tuple(ids)
