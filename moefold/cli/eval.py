"""`moefold eval`: how well the model of a run or of a Hugging Face folder predicts text, on one rank or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.cli.text_model_options import TextModelOptions, print_note
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options

if TYPE_CHECKING:
    from moefold.train.text_model import TextModel
    from moefold.train.text_scores import ChoiceScore, TextScore

STDLIB_LINES = "stdlib_lines"
Results = dict[str, dict[str, Any]]  # figures by the name of a file or task


@dataclass(frozen=True)
class EvalOptions(TextModelOptions):
    """Evaluate the model of a run or of a Hugging Face folder: perplexity of files in nats a token and bits a byte, and
    tasks. Without files and tasks the built-in task runs: which of four lines follows in a file of Python's standard
    library. Results of a run are also written to its folder, for `moefold report`."""

    files: tuple[str, ...] = ()
    """Files to predict, or folders of files: text, jsonl, parquet."""
    tasks: tuple[str, ...] = ()
    """Tasks by name: stdlib_lines, or those of lm-evaluation-harness (moefold[eval])."""
    task_folder: Path | None = None
    """A folder with tasks of one's own, as YAML files of lm-evaluation-harness."""
    chat: bool = False
    """Put questions of lm-evaluation-harness into the tokenizer's chat template, as a user's messages."""
    batch: int = 8
    """Sequences that a rank computes at once."""
    json: bool = False
    """Print JSON instead of a table."""

    @property
    def task_names(self) -> list[str]:
        """Names may be given apart or joined by commas."""
        names = ",".join(self.tasks).split(",")
        return [name for name in names if name]


FORM = CommandForm("eval", EvalOptions, config_keys=True, section="parallel")


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    check_options(options)

    from moefold.cli.text_model_ranks import run_on_ranks  # checkpoints and starts, which --help does without

    return run_on_ranks(["eval", *argv], options, overrides, partial(evaluate_and_report, options))


def check_options(options: EvalOptions) -> None:
    if options.batch < 1:
        raise UserError(f"batch = {options.batch} is not legal; expected at least 1, such as 8")
    folder = options.task_folder
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-folder {folder} is no folder; expected one with YAML files of tasks")
    names = options.task_names
    if options.chat and not set(names) - {STDLIB_LINES}:
        raise UserError(
            "--chat acts on tasks of lm-evaluation-harness alone, and none is named; name one with --tasks, or leave "
            "it out"
        )
    for name in names:
        if name != STDLIB_LINES and find_spec("lm_eval") is None:
            raise UserError(
                f'no built-in task "{printable_text(name)}"{did_you_mean(name, [STDLIB_LINES])}; expected '
                f"{STDLIB_LINES}; tasks of lm-evaluation-harness need pip install 'moefold[eval]'"
            )


def evaluate_and_report(options: EvalOptions, text_model: TextModel) -> None:
    results = evaluate(text_model, options)
    if text_model.executor.world.rank == 0:
        report_results(options, text_model.step, results)


def report_results(options: EvalOptions, step: int | None, results: Results) -> None:
    from moefold.web.evaluations import run_folder_of, write_evaluation  # numpy

    if options.json:
        print(json.dumps({"source": str(options.source), "step": step, "results": results}))
    else:
        print_results(results)
    folder = run_folder_of(options.source)
    if step is None or folder is None:
        return
    try:
        write_evaluation(folder, step, results)
    except OSError as error:
        print_note(f"warning: {folder} takes no evaluations.jsonl ({error}); the report will not show these results")


def evaluate(text_model: TextModel, options: EvalOptions) -> Results:
    from moefold.train.text_scores import line_questions, score_files, score_questions

    results: Results = {}
    for name in options.files:
        score = score_files(text_model, name, options.batch)
        results[name] = text_figures(score)
    names = options.task_names
    if STDLIB_LINES in names or not (names or options.files):
        found = score_questions(text_model, line_questions(), options.batch)
        results[STDLIB_LINES] = choice_figures(found)
    others = [name for name in names if name != STDLIB_LINES]
    if others:
        from moefold.train.harness import run_tasks  # lm_eval

        results |= run_tasks(text_model, others, options.task_folder, options.batch, options.chat)
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
