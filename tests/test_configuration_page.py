"""docs/configuration.md has every key as it is, and the pages that translate and teach name keys that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moefold.config.keys import ConfigKey, iterate_keys
from moefold.presets.zoo import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEACHING = ("from_megatron.md", "from_hugging_face.md", "tuning.md", "faq.md")
KEYS = {key.path: key for key in iterate_keys(PRESETS["tiny"]())}
SECTIONS = {path.partition(".")[0] for path in KEYS if "." in path}


def test_the_page_is_current(tmp_path: Path):
    """Made by a process of its own: in this one, tests may have registered names."""
    made = tmp_path / "configuration.md"
    subprocess.run([sys.executable, "-m", "tests.support.configuration_page", str(made)], cwd=ROOT, check=True)
    text = made.read_text(encoding="utf-8")
    assert [path for path in KEYS if f"\n| `{path}` | " not in text] == []
    assert (DOCS / made.name).read_text(encoding="utf-8") == text, (
        "make it again: python -m tests.support.configuration_page docs/configuration.md"
    )


def named_settings(page: Path) -> list[tuple[str, list[str]]]:
    """Keys in backticks, and the words behind them."""
    text = page.read_text(encoding="utf-8")
    spans = [span.split() for span in re.findall(r"`([a-z_]+\.[^`]+)`", text)]
    return [(first, values) for first, *values in spans if first.partition(".")[0] in SECTIONS]


def takes_value(key: ConfigKey, value: str) -> bool:
    return not key.choices or value in key.choices


@pytest.mark.parametrize("name", TEACHING)
def test_a_page_names_keys_that_exist_with_legal_values(name: str):
    settings = named_settings(DOCS / name)
    assert settings
    assert [path for path, _ in settings if path not in KEYS] == []
    assert [(path, values) for path, values in settings if not all(takes_value(KEYS[path], v) for v in values)] == []
