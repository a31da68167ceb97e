"""The wheel has every file of the package, and runs where it is installed. Hatch leaves out what .gitignore names, even
where git has the file."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

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


# ---- installed


def say(*words: str | Path, folder: Path) -> str:
    """What a command prints that is run outside of the tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def new_environment(folder: Path) -> Path:
    """The programs of a virtual environment that has the packages of this one, but not the tree that is installed here:
    a folder that a .pth file names is searched, and the .pth files in it are not read."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [other for other in sys.path if other.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return folder / "bin"


@pytest.mark.extended
def test_the_wheel_runs_in_a_new_environment(tmp_path: Path):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    say(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("moefold-*.whl")
    programs = new_environment(tmp_path / "environment")
    install = ("install", "--no-deps", "--no-index", "--quiet", wheel)
    say(sys.executable, "-m", "pip", "--python", programs / "python", *install, folder=tmp_path)
    imported = say(programs / "python", "-c", "import moefold; print(moefold.__file__)", folder=tmp_path)
    assert Path(imported.strip()).is_relative_to(programs.parent)
    small = ("--train.steps", "2", "--train.validate_sequences", "2", "--train.sample_tokens", "4")
    trained = say(programs / "moefold", "train", "tiny", *small, "--train.device", "cpu", folder=tmp_path)
    assert "step 2/2" in trained
    assert "tokens/s a GPU" in say(programs / "moefold", "plan", "qwen3-30b-a3b", "--gpus", "16", folder=tmp_path)
    assert "FLOPs/token" in say(programs / "moefold", "explain", "tiny", folder=tmp_path)
