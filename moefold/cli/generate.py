"""`moefold generate`: text from a run, a checkpoint or a folder of Hugging Face weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moefold.cli.text_model_options import TextModelOptions, print_note
from moefold.config.errors import UserError
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options
from moefold.printable import escape_character

if TYPE_CHECKING:
    from moefold.train.text_generator import GenerationRequest, TextGenerator
    from moefold.train.text_model import TextModel


@dataclass(frozen=True)
class GenerateOptions(TextModelOptions):
    """Continue texts, or answer as a chat, with the model of a run or of a Hugging Face folder. One prompt's text is
    printed as it comes; several are computed in one batch."""

    prompt: tuple[str, ...] = ()
    """The texts to continue, one or several."""
    chat: bool = False
    """Answer each prompt as a user's message, by the tokenizer's chat template."""
    tokens: int = 200
    """Most tokens of each answer; an end token or the longest sequence may come before."""
    temperature: float = 0.7
    """Divides the logits; 0: always the most likely token."""
    top_k: int = 0
    """Draw among that many most likely tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability; 1: all."""
    min_p: float = 0.0
    """Draw among tokens with at least this share of the most likely one's probability; 0: all."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; they are not printed."""
    seed: int = 1
    """Random seed; the i-th prompt draws with seed + i."""


FORM = CommandForm("generate", GenerateOptions, config_keys=True, section="parallel")


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    if not options.prompt:
        raise UserError('no prompt is given; expected at least one, such as --prompt "def "')

    from moefold.cli.text_model_ranks import run_on_ranks  # checkpoints and starts, which --help does without

    return run_on_ranks(["generate", *argv], options, overrides, partial(generate_and_print, options))


def generate_and_print(options: GenerateOptions, text_model: TextModel) -> None:
    """All ranks make the same texts; the first prints them."""
    from moefold.generate.sampling import Sampling  # torch, from here on
    from moefold.train.text_generator import GenerationRequest, TextGenerator

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
    request = GenerationRequest(options.prompt, options.tokens, options.stop, options.chat, sampling)
    generator = TextGenerator(text_model)
    if text_model.executor.world.rank > 0:
        generator.answer(request)
        return
    begun = time.perf_counter()
    if len(options.prompt) == 1:
        print_as_it_comes(generator, request)
    else:
        print_answers(request, generator.answer(request))
    print_note(f"{time.perf_counter() - begun:.1f} s")


def print_as_it_comes(generator: TextGenerator, request: GenerationRequest) -> None:
    if not request.chat:
        print_part(0, request.prompts[0])
    generator.answer(request, print_part)
    print()


def print_answers(request: GenerationRequest, answers: Sequence[str]) -> None:
    for number, (prompt, answer) in enumerate(zip(request.prompts, answers, strict=True)):
        print(f"--- prompt {number + 1} of {len(answers)}")
        print_part(number, answer if request.chat else prompt + answer)
        print()


def print_part(_: int, text: str) -> None:
    """Text of a model may hold anything: control characters but for line ends and tabs are escaped."""
    safe = [character if character in "\n\t" else escape_character(character) for character in text]
    print("".join(safe), end="", flush=True)
