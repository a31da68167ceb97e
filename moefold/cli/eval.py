"""`moefold eval`: how well the model of a run or of a Hugging Face folder predicts text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moefold.cli.text_model_options import TextModelOptions
from moefold.config.errors import UserError, one_of
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options

if TYPE_CHECKING:
    from moefold.train.text_model import TextModel
    from moefold.train.text_scores import ChoiceScore, TextScore

STDLIB_LINES = "stdlib_lines"
TASKS = (STDLIB_LINES,)
Results = dict[str, dict[str, Any]]  # figures by the name of a file or task


@dataclass(frozen=True)
class EvalOptions(TextModelOptions):
    """Evaluate the model of a run or of a Hugging Face folder: perplexity of files in nats a token and bits a byte, and
    tasks. Without files and tasks the built-in task runs: which of four lines follows in a file of Python's standard
    library."""

    files: tuple[str, ...] = ()
    """Files to predict, or folders of files: text, jsonl, parquet."""
    tasks: tuple[str, ...] = ()
    """Tasks by name: stdlib_lines."""
    batch: int = 8
    """Sequences that are computed at once."""
    json: bool = False
    """Print JSON instead of a table."""


FORM = CommandForm("eval", EvalOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    for name in options.tasks:
        one_of("task", name, TASKS)
    if options.batch < 1:
        raise UserError(f"batch = {options.batch} is not legal; expected at least 1, such as 8")
    options.require_source()

    from moefold.train.text_model import load_text_model  # torch, from here on

    text_model = load_text_model(**options.load_arguments())
    results = evaluate(text_model, options)
    if options.json:
        print(json.dumps({"source": str(options.source), "results": results}))
    else:
        print_results(results)
    return 0


def evaluate(text_model: TextModel, options: EvalOptions) -> Results:
    from moefold.train.text_scores import line_questions, score_files, score_questions

    results: Results = {}
    for name in options.files:
        score = score_files(text_model, name, options.batch)
        results[name] = text_figures(score)
    tasks = options.tasks
    if not tasks and not options.files:
        tasks = TASKS
    for name in tasks:
        found = score_questions(text_model, line_questions(), options.batch)
        results[name] = choice_figures(found)
    return results


def text_figures(score: TextScore) -> dict[str, Any]:
    return {
        "nats_per_token": score.nats_per_token,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens": score.tokens,
        "bytes": score.size,
    }


def choice_figures(score: ChoiceScore) -> dict[str, Any]:
    return {
        "accuracy": score.right / score.questions,
        "accuracy_by_byte": score.right_by_byte / score.questions,
        "questions": score.questions,
    }


def print_results(results: Results) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("file or task", "figure", "value")
    for name, figures in results.items():
        for figure, value in figures.items():
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            table.add_row(name, figure.replace("_", " "), shown)
            name = ""
        table.add_section()
    Console().print(table)
