"""docs/python.md teaches the Python API; every block of it runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def code_blocks(page: Path) -> list[tuple[int, str]]:
    """The page's Python blocks with the numbers of their first lines."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in found]


def test_every_block_of_the_page_runs():
    namespace: dict[str, object] = {}
    blocks = code_blocks(PAGE)
    assert len(blocks) >= 7
    for line, code in blocks:
        exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
