"""Every `moefold ...` command line of README and docs parses: no unknown option, key, value or preset."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from moefold.cli import bench
from moefold.cli.command_forms import COMMAND_FORMS
from moefold.cli.main import COMMANDS
from moefold.config.errors import UserError, one_of
from moefold.presets.command_options import CommandForm, read_options
from moefold.presets.recipe import resolve_recipe
from tests.support.house import ROOT

REPOSITORY = ROOT.parent
ASSIGNMENT = re.compile(r'^([A-Z]+)="(.*)"$')
CALL = re.compile(r"(?:^|&& |\$ )(?:[A-Z_]+=\S+ )*(?:torchrun .*-m )?moefold ([a-z-].*)")


def fenced_lines(text: str) -> list[str]:
    """Lines inside fences, with continued lines joined."""
    lines: list[str] = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    return lines


def commands_of(text: str) -> list[str]:
    """The words after `moefold` of each command in a fence, with the shell variables of that page filled in."""
    variables: dict[str, str] = {}
    found: list[str] = []
    for line in fenced_lines(text):
        if assigned := ASSIGNMENT.match(line):
            variables[assigned[1]] = assigned[2]
        elif call := CALL.search(line):
            found.append(re.sub(r"\$([A-Z]+)", lambda name: variables[name[1]], call[1]))
    return found


def documented_commands() -> list[str]:
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    return [f"{page.name}: {command}" for page in pages for command in commands_of(page.read_text(encoding="utf-8"))]


def find_form(words: Sequence[str]) -> tuple[CommandForm[Any], list[str]]:
    """The form of a command line without `moefold`, and its words behind the command's own."""
    one_of("command", words[0], COMMANDS)
    by_name = {form.name: form for form in COMMAND_FORMS}
    for count in (2, 1):  # `doctor parity` before `doctor`
        form = by_name.get(" ".join(words[:count]))
        if form is not None:
            return form, list(words[count:])
    named = words[1:2] and not words[1].startswith("-")
    if named:
        one_of("benchmark", words[1], bench.SUBJECTS)
    return bench.FORMS[bench.DEFAULT_SUBJECT], list(words[1:])


def parse_command(command: str) -> None:
    """Read the command as `moefold` would, and run nothing."""
    words: list[str] = []
    for word in shlex.split(command, comments=True):
        if word in ("&&", "|", ">"):
            break
        words.append(word)
    form, rest = find_form(words)
    options, overrides = read_options(form, rest)
    recipe = getattr(options, "recipe", getattr(options, "model", "tiny"))
    known = recipe if form.config_keys and not recipe.endswith(".yaml") else "tiny"
    resolve_recipe(known, overrides, world=None)


REFUSED_ON_PURPOSE = "--train.stps 20"  # README shows the messages


@pytest.mark.parametrize("example", documented_commands())
def test_a_documented_command_parses(example: str):
    _, _, command = example.partition(": ")
    if REFUSED_ON_PURPOSE in command:
        with pytest.raises(UserError, match=r"train\.stps"):
            parse_command(command)
    else:
        parse_command(command)


def test_commands_are_found_on_pages():
    found = documented_commands()
    assert len(found) > 40
    assert any(example.startswith("planner.md: plan deepseek-v3") for example in found)
    assert any("train olmoe-1b-7b --out" in example for example in found), "after torchrun -m"


@pytest.mark.parametrize(
    "wrong",
    [
        "train tiny --train.stps 3",
        "train tiny train.steps=many",
        "plan qwen4 --gpus 8",
        "simulate --schedul 1f1b",
        "web [--port 8765]",
        "ckpt ls RUN  tensors of a run",
    ],
)
def test_a_planted_mistake_is_found(wrong: str):
    (command,) = commands_of(f"```\n$ moefold {wrong}\n```\n")
    with pytest.raises((UserError, SystemExit)):
        parse_command(command)
