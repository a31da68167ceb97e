"""The commands that README.md and docs/ show: found in the text, parsed without running, and run with their output
compared.

A block is a fenced piece of text without a language. A line of it that begins with `$ `, `echo `, `moefold ` or
`torchrun ` is a command; after `$ ` the lines up to the next command are what it prints.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import moefold.cli
from moefold.cli.main import run_command_line
from moefold.cli.train import TrainOptions
from moefold.config.keys import iterate_keys
from moefold.config.read import parse_overrides
from moefold.presets.command_options import read_options
from moefold.presets.recipe import resolve_recipe, unsaid_settings
from moefold.presets.zoo import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"\$ |echo |moefold |torchrun ")
ASSIGNMENT = re.compile(r'(\w+)="(.*)"$')
REFUSAL = "moefold: "


class DocCommand(NamedTuple):
    text: str
    output: list[str]

    @property
    def is_refused(self) -> bool:
        return bool(self.output) and self.output[0].startswith(REFUSAL)


class DocBlock(NamedTuple):
    page: str
    line: int
    commands: list[DocCommand]


# ---- found in the text


def read_blocks(page: Path) -> Iterator[DocBlock]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        commands = read_commands(found[2].splitlines()) if not found[1] else []
        if commands:
            line = text.count("\n", 0, found.start()) + 1
            yield DocBlock(str(page.relative_to(ROOT)), line, commands)


def read_commands(lines: Sequence[str]) -> list[DocCommand]:
    commands: list[DocCommand] = []
    variables: dict[str, str] = {}
    prompted = False
    for line in lines:
        if assigned := ASSIGNMENT.match(line):
            variables[f"${assigned[1]}"] = assigned[2]
        elif COMMAND.match(line) and not line.startswith(REFUSAL):
            command = replace_all(line.removeprefix("$ "), variables)
            commands.append(DocCommand(command, []))
            prompted = line.startswith("$ ")
        elif prompted:
            commands[-1].output.append(line)
    return commands


def replace_all(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def inline_commands(page: Path) -> Iterator[str]:
    """Commands that are named in prose, such as `moefold explain`, also where a line ends inside one."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for found in re.finditer(r"`moefold\s([^`]+)`", text):
        yield " ".join(found[1].split())


# ---- parsed without running


class Parsed(Exception):
    """The options of a command and its overrides, raised where the command would begin to work."""

    def __init__(self, options: Any, overrides: list[str]) -> None:
        super().__init__()
        self.options = options
        self.overrides = overrides


def split_command(text: str) -> list[str]:
    """The calls of a command line. Two spaces end it; its meaning follows."""
    return re.split(r"\s{2,}", text)[0].split(" && ")


def moefold_calls(text: str) -> Iterator[tuple[list[str], int]]:
    """Arguments of each call of moefold in a command line, and the ranks that torchrun gives it."""
    for call in split_command(text):
        plain = call.replace("[", "").replace("]", "").replace(" ...", "")
        words = shlex.split(plain, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words[:1] == ["moefold"]:
            yield words[1:], 1
        elif words[:1] == ["torchrun"]:
            after = words.index("moefold") + 1
            ranks = words[words.index("--nproc-per-node") + 1]
            yield words[after:], int(ranks)


def check_command(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a command line that the command line of moefold would refuse by its options, keys or values."""
    for module in pkgutil.iter_modules(moefold.cli.__path__):
        imported = importlib.import_module(f"moefold.cli.{module.name}")
        if hasattr(imported, "read_options"):
            monkeypatch.setattr(imported, "read_options", stop_after_options)
    for argv, ranks in moefold_calls(text):
        check_call(argv, ranks)


def stop_after_options(*arguments: Any, **named: Any) -> Any:
    options, overrides = read_options(*arguments, **named)
    raise Parsed(options, overrides)


def check_call(argv: Sequence[str], ranks: int) -> None:
    try:
        code = run_command_line(argv)
    except Parsed as parsed:
        check_overrides(parsed.options, parsed.overrides, ranks)
    else:
        assert code == 0, f"moefold {shlex.join(argv)} is refused"


def known_keys() -> set[str]:
    return {key.path for key in iterate_keys(PRESETS["tiny"]())}


def check_overrides(options: Any, overrides: Sequence[str], ranks: int) -> None:
    unknown = set(parse_overrides(overrides)) - known_keys()
    assert not unknown, f"no such keys: {sorted(unknown)}"
    recipe = getattr(options, "recipe", None)
    if recipe is None:
        return
    if isinstance(options, TrainOptions) and recipe in PRESETS:
        unsaid = unsaid_settings(recipe, overrides)
        assert not unsaid, unsaid
    started = max(ranks, getattr(options, "nproc", 1), getattr(options, "world", 1))
    # A file, or a folder of weights, that the page only imagines: the keys are tried on the smallest model.
    resolve_recipe(recipe if recipe in PRESETS else "tiny", overrides, started)


def check_name(text: str) -> None:
    """Refuse a command that is named in prose, its arguments left out, if it or one of its options does not exist."""
    words = text.split()
    has_subject = words[0] in ("bench", "doctor") and len(words) > 1
    parts = 2 if has_subject else 1
    if words[0].startswith("--"):  # an option of moefold itself
        parts = 0
    known = help_text(*words[:parts])
    for word in words[parts:]:
        if not word.startswith("--") or word.endswith("..."):
            continue
        if "." in word:
            assert word.removeprefix("--") in known_keys(), f"`moefold {text}`: no key {word}"
        else:
            assert re.search(rf"{word}(?![\w.-])", known), f"`moefold {text}`: --help does not list {word}"


@cache
def help_text(*command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            code = run_command_line([*command, "--help"])
        except SystemExit as done:
            code = done.code
    assert code == 0, f"no command `moefold {' '.join(command)}`"
    return printed.getvalue()


# ---- run, with their output compared


def run_in_shell(command: DocCommand, folder: Path) -> None:
    """Run a command as it is typed. What the page says it prints must be there, in that order."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    # A function, since a script of an installed moefold might be that of another tree.
    script = f'moefold() {{ {shlex.quote(sys.executable)} -m moefold "$@"; }}\n{command.text}'
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == (2 if command.is_refused else 0), done.stdout + done.stderr
    check_output(command.output, done.stdout + done.stderr)


def check_output(said: Sequence[str], printed: str) -> None:
    """Spaces and the ends of lines do not count; `...` at the end of a line stands for its rest."""
    text = " ".join(printed.split())
    at = 0
    for line in said:
        wanted = " ".join(line.removesuffix("...").split())
        found = text.find(wanted, at)
        assert found >= 0, f"not printed, or not in this order: {wanted}\nprinted:\n{printed}"
        at = found + len(wanted)
