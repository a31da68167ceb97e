"""The Python blocks of README and docs run: those of a page in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_commands import PAGES, ROOT

FORMS = ("docs/add_a_kernel.md",)  # `...` stands for the body
SHORTER = {"train__steps=20": "train__steps=2"}


def code_blocks(page: Path) -> list[tuple[int, str]]:
    """The page's Python blocks with the numbers of their first lines."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^ *```python\n(.*?)^ *```", text, re.M | re.S)
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in found]


def pages_with_blocks() -> list[str]:
    pages = [str(page.relative_to(ROOT)) for page in PAGES if code_blocks(page)]
    return [page for page in pages if page not in FORMS]


@pytest.fixture
def folder(document_folder: Path, tmp_path: Path) -> Path:
    for given in document_folder.iterdir():
        (tmp_path / given.name).symlink_to(given)
    (tmp_path / "out").symlink_to(document_folder / "DIR")  # what README's command before has converted
    return tmp_path


@pytest.mark.parametrize("page", pages_with_blocks())
def test_every_block_of_the_page_runs(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    namespace: dict[str, object] = {}
    for line, code in code_blocks(ROOT / page):
        for written, shorter in SHORTER.items():
            code = code.replace(written, shorter)
        exec(compile("\n" * line + code, page, "exec"), namespace)


def test_a_form_has_no_body():
    for page in FORMS:
        assert all("...\n" in code for _, code in code_blocks(ROOT / page))
