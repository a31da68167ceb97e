"""Extensions of other packages: names that a configuration accepts, with code that is loaded when a run needs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moefold.config.errors import UserError
from moefold.config.extensions import EXTENSION_KINDS, EXTENSIONS, Extension, find_extension, register_extension
from moefold.presets.recipe import resolve_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forget_registered() -> Iterator[None]:
    before = dict(EXTENSIONS)
    yield
    for kind, name in EXTENSIONS.keys() - before.keys():
        EXTENSION_KINDS[kind].remove(name)
        del EXTENSIONS[kind, name]


def test_a_registered_name_is_legal_and_its_implementation_is_found():
    with pytest.raises(UserError, match="mine"):
        resolve_recipe("tiny", ["--model.moe.router.score=mine"])
    register_extension(Extension("router_score", "mine", "a score of mine", "os.path:join"))
    assert resolve_recipe("tiny", ["--model.moe.router.score=mine"]).model.moe.router.score == "mine"
    found = find_extension("router_score", "mine")
    assert found is not None
    assert found.load() is __import__("os").path.join
    assert find_extension("router_score", "softmax") is None


def test_a_built_in_name_an_unknown_kind_and_a_second_meaning_are_refused():
    with pytest.raises(UserError, match="built-in"):
        register_extension(Extension("router_score", "softmax", "", "os:getcwd"))
    with pytest.raises(UserError, match="router_score"):
        register_extension(Extension("router_scores", "mine", "", "os:getcwd"))
    register_extension(Extension("dispatcher", "mine", "one line", "os:getcwd"))
    with pytest.raises(UserError, match="already"):
        register_extension(Extension("dispatcher", "mine", "another line", "os:getcwd"))


def installed_package(folder: Path, names: str) -> None:
    """A package with entry points, as pip would install it."""
    (folder / "others.py").write_text(names)
    information = folder / "others-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[moefold.extensions]\nmine = others:MINE\nbroken = others:MISSING\n")


def test_entry_points_of_installed_packages_are_read_without_torch_and_a_broken_one_is_reported(tmp_path: Path):
    names = "from moefold import Extension\n"
    names += (
        "MINE = Extension('dispatcher', 'theirs', 'sends their way', 'others_with_torch:build', price=lambda *_: 1e9)\n"
    )
    installed_package(tmp_path, names)
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
    code += "from moefold.cli.main import run_command_line\n"
    words = ["explain", "tiny", "--nproc", "2", "--parallel.ep", "2", "--parallel.dispatcher", "theirs"]
    code += f"code = run_command_line({words!r})\n"
    code += "assert 'torch' not in sys.modules\nsys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "theirs" in done.stdout
    assert "broken" in done.stderr
    assert "left out" in done.stderr
