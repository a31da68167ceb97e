"""Links between pages of the repository lead somewhere: to a file, and to a heading where one is named."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.doc_commands import PAGES, ROOT

FURTHER = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.M | re.S)


@cache
def anchors_of(page: Path) -> set[str]:
    """Names of headings as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def is_broken(link: str, page: Path) -> bool:
    if ":" in link:
        return False  # an address outside
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors_of(target)


@pytest.mark.parametrize("page", [*PAGES, *FURTHER], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    assert [link for link in links if is_broken(link, page)] == []


def test_a_link_that_leads_nowhere_is_found():
    page = ROOT / "README.md"
    assert not is_broken("docs/walk.md#glossary", page)
    assert is_broken("docs/nothing.md", page)
    assert is_broken("docs/walk.md#nothing", page)
