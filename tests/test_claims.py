"""Claims: every row of README's table names what shows it, and every command of README and docs is one that works."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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
    read_blocks,
    read_commands,
)

ABSENT = ("not yet", "not measured", "never run")
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
