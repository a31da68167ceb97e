"""--help of every command: one screen, plain types, keys by section."""

import re

import pytest

from moefold.cli.command_forms import COMMAND_FORMS
from moefold.cli.main import COMMANDS, run_command_line
from moefold.config.keys import iterate_keys
from moefold.presets.zoo import PRESETS

SCREEN_LINES, SCREEN_COLUMNS = 44, 80
FORMS = {form.name: form for form in COMMAND_FORMS}
KEYS = list(iterate_keys(PRESETS["tiny"]()))


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        run_command_line(words)
    assert leaving.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def narrow_screen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))


def test_every_command_has_a_form():
    assert {name.split()[0] for name in FORMS} == set(COMMANDS)


@pytest.mark.parametrize("name", FORMS)
def test_help_fits_a_screen_and_has_plain_types(name: str, capsys: pytest.CaptureFixture[str]):
    shown = help_of(capsys, *name.split(), "--help")
    lines = shown.splitlines()
    assert lines[0].startswith(f"usage: moefold {name}")
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    assert not re.search(r"None|\bSTR\b|\bINT\b|\bFLOAT\b|\{[A-Z]", shown)


def test_help_of_train_has_options_with_types_and_defaults(capsys: pytest.CaptureFixture[str]):
    shown = help_of(capsys, "train", "--help")
    assert "moefold train [RECIPE] [OPTIONS] [KEY=VALUE ...]" in shown
    assert re.search(r"--nproc N +How many ranks to start on this machine \(default 1\)", shown)
    assert re.search(r"--out PATH +The run's folder", shown)
    assert "moefold train --help optim" in shown
    for section in ("model", "data", "train", "optim", "parallel"):
        count = sum(key.path.startswith(f"{section}.") for key in KEYS)
        assert f"{section} ({count})" in shown


def test_a_switch_that_is_on_is_shown_as_it_is_turned_off(capsys: pytest.CaptureFixture[str]):
    assert "--no-browser" in help_of(capsys, "web", "--help")


@pytest.mark.parametrize("section", ["optim", "model", "model.moe", "train.steps"])
def test_help_of_a_section_lists_its_keys_alone(section: str, capsys: pytest.CaptureFixture[str]):
    shown = help_of(capsys, "train", "tiny", "--help", section)
    for key in KEYS:
        inside = key.path == section or key.path.startswith(f"{section}.")
        assert (f"  --{key.path} " in shown) == inside, key.path


def test_help_all_lists_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]):
    shown = help_of(capsys, "explain", "--help", "all")
    assert all(f"  --{key.path} " in shown and key.doc in shown for key in KEYS)
    assert "--nproc" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--help", "optm"], 'no section "optm" (did you mean "optim"?)'),
        (["simulate", "--help", "optim"], "moefold simulate takes no configuration keys"),
    ],
)
def test_help_of_an_unknown_section_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("train --port x", "--port x is not legal; expected a whole number"),
        ("simulate --vpp=two", "--vpp two is not legal; expected a whole number"),
        ("plan --tokens many", "--tokens many is not legal; expected a number"),
    ],
)
def test_a_bad_value_is_refused_in_plain_words(words: str, wanted: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"moefold: {wanted}")
