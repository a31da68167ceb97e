"""lm-evaluation-harness: a text model in the form in which the harness calls models, registered there as `moefold`, and
tasks by name. The one file that touches `lm_eval`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.data.tokenizer import HuggingFaceTokenizer, read_token_options, stated_token
from moefold.generate.likelihood import Continuation, Likelihood
from moefold.generate.next_logits import TokenIds
from moefold.generate.rank_batches import Numbers, compute_batches, cut_batches
from moefold.generate.sampling import Sampling
from moefold.train.text_generator import GenerationRequest, TextGenerator, chat_template_of, render_messages
from moefold.train.text_model import TextModel, load_text_model
from moefold.train.text_scores import text_ids

DEFAULT_BATCH = 8
ANSWER_TOKENS = 256  # of an answer, as the harness has it
BOOTSTRAPS = 1000  # of standard errors that have no formula

Figures = dict[str, float]


@register_model("moefold")
class HarnessModel(TemplateLM):
    """`path` is a run, a checkpoint, a Hugging Face folder or a text model; options are those of `load_text_model`.
    Every rank is given all requests, and computes its part of them."""

    def __init__(
        self,
        path: str | Path | TextModel,
        batch_size: int | str = DEFAULT_BATCH,
        device: str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ):
        super().__init__()
        if not isinstance(path, TextModel):
            path = load_text_model(path, device or "auto", **options)
        self.text_model = path
        self.batch = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.text_model.tokenizer.end.id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: that which begins texts, else that which ends them."""
        tokenizer = self.text_model.tokenizer
        begins = None
        if self.text_model.is_published and isinstance(tokenizer, HuggingFaceTokenizer):
            options = read_token_options(tokenizer.folder / "tokenizer_config.json")
            begins = tokenizer.engine.token_to_id(str(stated_token(options, "bos_token")))
        return self.eot_token_id if begins is None else begins

    @property
    def tokenizer_name(self) -> str:
        """What requests are cached under, which the harness does where it is asked to."""
        tokenizer = self.text_model.tokenizer
        return str(tokenizer.folder) if isinstance(tokenizer, HuggingFaceTokenizer) else "bytes"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source, for the harness's records."""
        return chat_template_of(self.text_model.tokenizer).source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Without `add_generation_prompt` the last message is how the answer begins."""
        return render_messages(self.text_model.tokenizer, chat_history, continues=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A chat template may have put the first token already."""
        if add_special_tokens is False or self.has_prefix(string):
            return self.text_model.tokenizer.encode(string).tolist()
        return list(text_ids(self.text_model, string))

    def has_prefix(self, string: str) -> bool:
        tokenizer = self.text_model.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return False
        prefix = tokenizer.engine.id_to_token(self.prefix_token_id)
        return prefix is not None and string.startswith(prefix)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        continuations = [Continuation(context, tokens) for _, context, tokens in requests]
        return [(each.log_p, each.is_greedy) for each in self.score(continuations)]

    def score(self, continuations: Sequence[Continuation]) -> list[Likelihood]:
        longest = self.text_model.longest
        most = max((len(each.tokens) for each in continuations), default=0)
        if most > longest:
            raise UserError(f"a task asks for {most} tokens at once; expected at most {longest}; raise --seq-len")
        return self.text_model.score(continuations, self.batch)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows: each token is predicted once, and the last window has as much context as fits."""
        windows = [self.text_windows(*request.args) for request in requests]
        found = iter(self.score([window for some in windows for window in some]))
        return [sum(next(found).log_p for _ in some) for some in windows]

    def text_windows(self, text: str) -> list[Continuation]:
        """As the harness's own class `hf` cuts them. A text of a run has its token of before as the prefix."""
        ids = self.tok_encode(text, add_special_tokens=None if self.text_model.is_published else False)
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.text_model.longest, context_len=1)
        return [Continuation(*make_disjoint_window(window)) for window in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts of requests with equal options, in batches of similar lengths."""
        generator = TextGenerator(self.text_model)
        asked = [request.args for request in requests]
        prompts = [self.tok_encode(context) for context, _ in asked]

        def generate_some(numbers: Numbers) -> list[str]:
            _, options = asked[numbers[0]]
            return generate_texts(generator, [prompts[number] for number in numbers], options)

        by_options: dict[str, list[int]] = {}
        for number in sorted(range(len(asked)), key=lambda number: -len(prompts[number])):
            _, options = asked[number]
            by_options.setdefault(repr(options), []).append(number)
        batches = [some for numbers in by_options.values() for some in cut_batches(numbers, self.batch)]
        return compute_batches(batches, generate_some, self.text_model.ranks_with_other_prompts)


def generate_texts(generator: TextGenerator, prompts: Sequence[TokenIds], options: dict[str, Any]) -> list[str]:
    """The text behind each prompt. A prompt that leaves no room for the tokens asked for loses its first tokens."""
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    longest = generator.longest
    count = min(int(options.get("max_gen_toks", ANSWER_TOKENS)), longest - 1)
    temperature = options.get("temperature", 1.0) if options.get("do_sample") else 0.0
    sampling = Sampling(temperature, int(options.get("top_k", 0)), options.get("top_p", 1.0))
    fitting = [prompt[-(longest - count) :] for prompt in prompts]
    return generator.continue_ids(fitting, GenerationRequest((), count, stops, sampling=sampling))


def find_tasks(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Tasks of a folder alone where it has them all: the harness has thousands of files of its own to read."""
    if folder is not None:
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    tasks = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name not in tasks.all_tasks:
            guess = did_you_mean(name, tasks.all_tasks)
            known = "expected stdlib_lines, a task of --task-folder or one that `lm-eval ls tasks` shows"
            raise UserError(f'no task "{printable_text(name)}"{guess}; {known}')
    return tasks


def run_tasks(
    text_model: TextModel, names: Sequence[str], folder: Path | None, batch: int, chat: bool = False
) -> dict[str, Figures]:
    """Figures of each task, and of each task of a group; nothing on other ranks than the first. `chat`: questions are
    messages in the tokenizer's chat template."""
    if chat:
        chat_template_of(text_model.tokenizer)  # refused here, before data is read
    tasks = find_tasks(names, folder)
    model = HarnessModel(text_model, batch)
    options = {"log_samples": False, "bootstrap_iters": BOOTSTRAPS, "apply_chat_template": chat}
    with redirect_stdout(stderr):  # output is the results alone
        found = lm_eval.simple_evaluate(model, tasks=list(names), task_manager=tasks, **options)
    if not found:
        return {}
    return {name: task_figures(values) for name, values in found["results"].items()}


def task_figures(values: dict[str, Any]) -> Figures:
    """The harness names a figure by metric and filter: `acc,none`."""
    figures: Figures = {}
    for key, value in values.items():
        metric, _, kept = key.partition(",")
        if isinstance(value, int | float):
            figures[metric if kept in ("", "none") else f"{metric}_{kept}"] = value
    return figures
