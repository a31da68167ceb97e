"""The wheel has every file of the package. Hatch leaves out what .gitignore names, even where git has the file."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

from tests.support.doc_commands import ROOT

DATA_FILES = (
    "moefold/data/stdlib_tokenizer/tokenizer.json",
    "moefold/plan/gpus/h100.yaml",
    "moefold/web/page/planner.js",
)


def git(*words: str, given: str = "") -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, input=given, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files are those of no clone")
def test_no_file_of_the_package_is_left_out_of_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["moefold"]}
    files = git("ls-files", "moefold")
    assert {*DATA_FILES} <= {*files}
    assert git("check-ignore", "--no-index", "--stdin", given="\n".join(files)) == []


def test_an_ignored_file_is_found():
    assert git("check-ignore", "--no-index", "--stdin", given="moefold/build/x.py\n") == ["moefold/build/x.py"]
