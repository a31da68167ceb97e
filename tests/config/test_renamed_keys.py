"""Keys of earlier versions: they still work everywhere, are reported once, and are refused beside their new name."""

from pathlib import Path

import pytest

from moefold.config.errors import UserError
from moefold.config.keys import iterate_keys
from moefold.config.read import with_values
from moefold.config.renamed_keys import RENAMED_KEYS, report_renamed_key, with_new_names
from moefold.config.run import Config
from moefold.presets.recipe import resolve_recipe

KEYS = {key.path: key for key in iterate_keys(Config())}


@pytest.fixture(autouse=True)
def nothing_was_reported():
    report_renamed_key.cache_clear()


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_name_is_no_key_any_more_and_its_new_name_is_one(old: str):
    assert old not in KEYS
    assert RENAMED_KEYS[old] in KEYS


def test_an_old_name_in_yaml_works_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "old.yaml"
    file.write_text("model: {moe: {bias_rate: 0.5, router: sinkhorn, looks_ahead: true}}\n")
    config = resolve_recipe(str(file), ["--model.moe.bias_rate", "0"])
    assert config.model.moe.router.kind == "sinkhorn"
    assert config.model.moe.balance.bias_rate == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes.count("note: model.moe.router is now called model.moe.router.kind") == 1
    assert notes.count("note: model.moe.bias_rate is now called model.moe.balance.bias_rate") == 1


def test_an_old_name_on_the_command_line_works_and_is_reported_once(capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        config = resolve_recipe("tiny", ["--optim.gradient_travel", "bf16"])
        assert config.optim.gradient_reduce == "bf16"
    assert capsys.readouterr().err == "note: optim.gradient_travel is now called optim.gradient_reduce\n"


def test_only_rank_0_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    resolve_recipe("tiny", ["--optim.gradient_travel", "bf16"])
    assert capsys.readouterr().err == ""


def test_the_state_of_an_old_checkpoint_is_read_under_its_new_names():
    state = {"model.moe.capacity_factor": 1.5, "model.moe.top_k": 3}
    assert with_new_names(state)[0] == {"model.moe.capacity.factor": 1.5, "model.moe.top_k": 3}
    problems: dict[str, str] = {}
    config = with_values(Config(), state, problems)
    assert not problems
    assert config.model.moe.capacity.factor == 1.5


@pytest.mark.parametrize(
    "words",
    [
        ["--model.moe.z_loss=0.1", "--model.moe.balance.z_loss=0.2"],
        ["--model.moe.balance.z_loss=0.2", "--model.moe.z_loss=0.1"],
    ],
)
def test_both_names_of_one_key_are_refused(words: list[str]):
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", words)
    assert refused.value.problems == (
        "model.moe.z_loss and model.moe.balance.z_loss are both given, but model.moe.z_loss is the old name of "
        "model.moe.balance.z_loss; leave model.moe.z_loss out",
    )


def test_an_illegal_value_under_an_old_name_is_refused_with_the_new_name():
    with pytest.raises(UserError, match=r"model\.moe\.balance\.z_loss = -1 is not legal"):
        resolve_recipe("tiny", ["--model.moe.z_loss=-1"])
