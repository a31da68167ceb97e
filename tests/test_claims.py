"""Claims: every row of README's table names what shows it, and every command of README and docs is one that works."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest
import torch

from moefold.config.errors import UserError
from tests.support.doc_commands import (
    PAGES,
    ROOT,
    DocBlock,
    DocCommand,
    check_command,
    check_name,
    check_output,
    inline_commands,
    moefold_calls,
    read_blocks,
    read_commands,
    run_in_shell,
)

ABSENT = ("not yet", "not measured", "never run")
QUICK = {"explain", "simulate", "plan"}
SLOW = ("--search", "doctor parity")  # more than a few seconds: run by `make test-all`
BLOCKS = [block for page in PAGES for block in read_blocks(page)]


# ---- README's table


def read_table(page: Path, header: str) -> dict[str, str]:
    """The rows of a table of two columns: the first cell up to `(` or `:`, and the second."""
    _, _, rest = page.read_text(encoding="utf-8").partition(f"\n{header}\n|---|---|\n")
    rows: dict[str, str] = {}
    for line in rest.partition("\n\n")[0].splitlines():
        capability, state = (cell.strip() for cell in line.strip("|").split("|"))
        name = re.split(r"[(:]", capability)[0].strip()
        assert name not in rows, f"{page.name} has two rows of {name}"
        rows[name] = state
    return rows


STATES = read_table(ROOT / "README.md", "| capability | state |")
CLAIMS = read_table(ROOT / "docs" / "claims.md", "| claim | shown by |")


def is_absent(state: str) -> bool:
    return state.startswith(ABSENT)


def evidence(claim: str) -> list[str]:
    return re.findall(r"`([^`]+)`", CLAIMS[claim])


def test_every_row_of_the_table_has_its_line_and_the_reverse():
    assert len(STATES) > 20
    assert list(CLAIMS) == list(STATES)


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_is_claimed_names_what_shows_it(claim: str, monkeypatch: pytest.MonkeyPatch):
    shown_by = evidence(claim)
    assert bool(shown_by) != is_absent(STATES[claim]), f"{STATES[claim]}: shown by {shown_by}"
    for each in shown_by:
        if each.startswith("moefold "):
            check_command(each, monkeypatch)
        else:
            assert is_test(each), f"no test {each}"


def is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return function in tests if function else bool(tests)


# ---- commands of README and docs


def commands_of(*blocks: DocBlock) -> list[DocCommand]:
    return [command for block in blocks for command in block.commands]


@pytest.mark.parametrize("command", [each.text for each in commands_of(*BLOCKS) if not each.is_refused])
def test_a_command_in_a_block_parses(command: str, monkeypatch: pytest.MonkeyPatch):
    check_command(command, monkeypatch)


@pytest.mark.parametrize("name", sorted({name for page in PAGES for name in inline_commands(page)}))
def test_a_command_named_in_prose_exists_with_its_options(name: str):
    check_name(name)


def is_run_here(command: DocCommand) -> bool:
    """Refusals, commands without torch, and slow ones that need nothing but this machine."""
    words = [word for argv, _ in moefold_calls(command.text) for word in argv]
    if any(word.endswith(".yaml") and not (ROOT / word).exists() for word in words):
        return False  # a file that the page only imagines
    return command.is_refused or words[0] in QUICK or is_slow(command)


def is_slow(command: DocCommand) -> bool:
    return any(sign in command.text for sign in SLOW)


def runnable_blocks() -> list[object]:
    cases: list[object] = []
    for block in BLOCKS:
        commands = list(filter(is_run_here, block.commands))
        marks = [pytest.mark.extended] if any(map(is_slow, commands)) else []
        if commands:
            cases.append(pytest.param(commands, id=f"{block.page}:{block.line}", marks=marks))
    return cases


@pytest.mark.parametrize("commands", runnable_blocks())
def test_the_commands_of_a_block_run_and_print_what_the_page_says(commands: list[DocCommand], tmp_path: Path):
    if torch.cuda.is_available() and any("explain" in command.text for command in commands):
        pytest.skip("README shows the kernels of a CPU")
    drawings = tmp_path / "docs" / "schedules"
    drawings.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "schedules" / "comm.yaml", drawings)
    for command in commands:
        run_in_shell(command, tmp_path)
    for drawn in drawings.glob("*.svg"):
        assert drawn.read_text() == (ROOT / "docs" / "schedules" / drawn.name).read_text(), f"{drawn.name} is old"


# ---- planted faults are found


@pytest.mark.parametrize(
    "command",
    [
        "moefold trian tiny",
        "moefold train tiny --train.stepz 20",
        "moefold train tiny --nproc 4 --parallel.ep 3",
        "torchrun --nproc-per-node 2 -m moefold train tiny --parallel.pp 4",
        "moefold bench layers",
        "moefold plan tiny --gpuz 8",
        "moefold plan tiny --parallel.epp 8",
    ],
)
def test_a_command_that_would_be_refused_is_found(command: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises((AssertionError, SystemExit, UserError)):
        check_command(command, monkeypatch)


def test_output_that_differs_is_found():
    check_output(["a  table", "of three ..."], "a table\nof three lines\n")
    with pytest.raises(AssertionError, match="not printed"):
        check_output(["of three", "a table"], "a table\nof three lines\n")


def test_output_belongs_to_commands_behind_a_prompt():
    assert read_commands(["$ moefold a", "printed", 'X="--b 1"', "moefold c $X", "# said"]) == [
        DocCommand("moefold a", ["printed"]),
        DocCommand("moefold c --b 1", []),
    ]


def test_a_test_that_does_not_exist_is_found():
    assert is_test("tests/test_claims.py::test_a_test_that_does_not_exist_is_found")
    assert not is_test("tests/test_claims.py::test_that_is_not_there")
    assert not is_test("tests/test_nothing.py")
