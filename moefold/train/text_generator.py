"""A text generator: the model and the tokenizer of a run, a checkpoint or a Hugging Face folder, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.format.boxes import box_slices, relative_box
from moefold.checkpoint.hf.read_weights import expert_boxes, local_tensors
from moefold.config.errors import UserError
from moefold.config.run import CapacityConfig, Config, ModelConfig
from moefold.data.chat import Chat
from moefold.data.samples import open_template
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer, choose_tokenizer, load_tokenizer, read_token_options
from moefold.generate.decode import check_prompts, decode_tokens, tokens_that_fit
from moefold.generate.next_logits import TokenIds, model_logits
from moefold.generate.sampling import Sampling
from moefold.generate.text_stream import TextStream
from moefold.layout.axes import World
from moefold.model.transformer import Transformer
from moefold.observe.printer import Printer, print_nothing
from moefold.train.convert import (
    DEFAULT_LENGTH,
    WeightSource,
    longest_sequence,
    source_from_checkpoint,
    source_from_folder,
)
from moefold.train.from_hf import WeightFiller, build_to_evaluate, starting_weights

ShowText = Callable[[int, str], None]  # the number of a prompt, and text that follows it
DEFAULT_TOKENS = 200


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
    """`path` is a run, one of its checkpoints or a Hugging Face folder. `precision` auto: bf16 on a GPU, fp32 on a
    CPU. `seq_len`: the longest sequence, at most the model's own."""

    def __init__(
        self,
        path: str | Path,
        device: str = "auto",
        precision: str = "auto",
        seq_len: int = DEFAULT_LENGTH,
        say: Printer = print_nothing,
    ):
        folder = Path(path)
        self.is_published = (folder / "config.json").is_file()
        source = source_from_folder(folder) if self.is_published else source_from_checkpoint(folder, say)
        self.tokenizer = open_tokenizer(folder, source)
        self.longest = min(seq_len, longest_sequence(source))
        self.ends = end_token_ids(self.tokenizer)
        model = without_capacity(source.model)

        def make_filler(config: Config, world: World) -> WeightFiller:
            if self.is_published:
                return starting_weights(folder, config, world, say)
            return checkpoint_filler(source)

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = build_to_evaluate(model, precision, device, self.longest, make_filler)
        self.source = model_logits(self.model)

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
        prompts = self.encode_prompts(request)
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
        encode = self.encode_chat if request.chat else self.encode_text
        prompts = [encode(text) for text in request.prompts]
        check_prompts(prompts, self.longest, self.model.model.vocab)
        return prompts

    def encode_text(self, text: str) -> TokenIds:
        """As published tokenizers encode a text, with the token that begins it; as training encoded texts for a run."""
        tokenizer = self.tokenizer
        if self.is_published and isinstance(tokenizer, HuggingFaceTokenizer):
            return tokenizer.encode_whole(text).tolist()
        return tokenizer.encode(text).tolist()

    def encode_chat(self, text: str) -> TokenIds:
        """A user's message in the chat template, up to where the assistant goes on."""
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                "a chat needs the chat template of a tokenizer.json, and this run is trained on bytes; leave out --chat"
            )
        template = open_template(tokenizer, "a chat", "leave out --chat")
        message = {"role": "user", "content": text}
        try:
            rendered = template.render(Chat([message]), asks=True)
        except ValueError as error:
            raise UserError(f"the prompt {error}") from None
        return tokenizer.encode(rendered.text).tolist()


def show_nothing(_: int, text: str) -> None: ...


def without_capacity(model: ModelConfig) -> ModelConfig:
    """The model with experts that drop nothing: a capacity is counted over a batch, which a generated token has not."""
    moe = replace(model.moe, capacity=CapacityConfig())
    return replace(model, moe=moe)


def checkpoint_filler(source: WeightSource) -> WeightFiller:
    @torch.no_grad()
    def fill_from_checkpoint(model: Transformer) -> None:
        for name, parts in local_tensors(model).items():
            for held in parts:
                for box in expert_boxes(held):
                    place = relative_box(box, held.part)
                    values = source.fetch_box(name, box)
                    held.tensor[box_slices(place)].copy_(values)

    return fill_from_checkpoint


def open_tokenizer(folder: Path, source: WeightSource) -> Tokenizer:
    """The tokenizer with which a run was trained, or that of a Hugging Face folder."""
    vocab = source.model.vocab
    data = source.data
    if data is not None:
        name = choose_tokenizer(data, vocab)
        return load_tokenizer(name, vocab, data.end_token)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json; expected the model's own beside its weights; put it there")
    return load_tokenizer(str(path), vocab)


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a text: the tokenizer's, and all that generation_config.json names."""
    ids = [tokenizer.end.id]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        options = read_token_options(tokenizer.folder / "generation_config.json")
        stated = options.get("eos_token_id")
        listed = stated if isinstance(stated, list) else [stated]
        ids += [each for each in listed if isinstance(each, int)]
    return tuple(ids)
