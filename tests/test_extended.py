"""The sample that `make test` takes of parametrized tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.extended import SAMPLED_FILES, SAMPLED_GRIDS, mark_extended

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("file", SAMPLED_GRIDS)
def test_every_listed_function_exists(file: str):
    source = (ROOT / file).read_text()
    for name in SAMPLED_GRIDS[file]:
        assert f"def {name}(" in source, f"{file} has no {name}; mend SAMPLED_GRIDS in tests/support/extended.py"


def test_every_nth_case_of_a_listed_function_stays_in_the_sample():
    file, name, nth = next((file, name, nth) for file, grid in SAMPLED_GRIDS.items() for name, nth in grid.items())
    marked: list[str] = []

    def collected(nodeid: str) -> Any:
        return SimpleNamespace(nodeid=nodeid, add_marker=lambda _: marked.append(nodeid))

    cases = [f"{file}::{name}[{number}]" for number in range(2 * nth + 1)]
    mark_extended(map(collected, [*cases, f"{file}::test_another"]))
    assert [case for case in cases if case not in marked] == cases[::nth]
    assert not any("test_another" in nodeid for nodeid in marked)


def test_of_a_function_that_is_not_listed_every_fifth_case_stays_in_the_sample():
    marked: list[str] = []

    def collected(nodeid: str) -> Any:
        return SimpleNamespace(nodeid=nodeid, add_marker=lambda _: marked.append(nodeid))

    cases = [f"tests/test_none.py::test_one[{number}]" for number in range(11)]
    mark_extended(map(collected, ["tests/test_none.py::test_without_cases", *cases]))
    assert [case for case in cases if case not in marked] == cases[::5]


@pytest.mark.parametrize("file", SAMPLED_FILES)
def test_of_a_listed_file_each_function_keeps_its_first_case(file: str):
    assert (ROOT / file).exists(), f"mend SAMPLED_FILES in tests/support/extended.py: {file} is gone"
    marked: list[str] = []

    def collected(nodeid: str) -> Any:
        return SimpleNamespace(nodeid=nodeid, add_marker=lambda _: marked.append(nodeid))

    cases = [f"{file}::{name}[{number}]" for name in ("test_one", "test_another") for number in range(2)]
    mark_extended(map(collected, cases))
    assert marked == cases[1::2]
