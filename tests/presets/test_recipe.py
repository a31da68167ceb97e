"""A recipe is a preset or a file, with overrides laid over it."""

from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.read import config_as_yaml
from moefold.presets.recipe import resolve_recipe, unsaid_settings
from moefold.presets.zoo import PRESETS, is_published_model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_to_itself(name: str):
    assert resolve_recipe(name) == PRESETS[name]()


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("tny", "tiny"),
        ("mixtral", "mixtral-8x7b"),
        ("qwen3-30b", "qwen3-30b-a3b"),
        ("deepseek-v33", "deepseek-v3"),
        ("deepseek-v3-tny", "deepseek-v3-tiny"),
        ("kimi_k2", "kimi-k2"),
        ("gptoss-20b", "gpt-oss-20b"),
        ("", ""),
    ],
)
def test_an_unknown_preset_is_refused_with_the_nearest_and_all_there_are(wrong: str, near: str):
    with pytest.raises(UserError) as refused:
        resolve_recipe(wrong)
    assert f'no preset "{wrong}"' in str(refused.value)
    assert all(name in str(refused.value) for name in PRESETS)
    assert f'did you mean "{near}"' in str(refused.value) or not near


def test_overrides_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path):
    file = tmp_path / "run.yml"
    file.write_text("preset: mixtral-8x7b\ntrain: {steps: 5, seed: 9}\n")
    found = resolve_recipe(str(file), ["--train.steps", "6"])
    assert (found.train.steps, found.train.seed, found.model.hidden) == (6, 9, 4096)
    assert found.name == "mixtral-8x7b"


@pytest.mark.parametrize("preset", ["tny", "[tiny]", "5", "''"])
def test_a_file_with_an_unknown_preset_is_refused_with_what_there_is(preset: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"preset: {preset}\n")
    with pytest.raises(UserError, match=r"no preset .*there are: .*tiny"):
        resolve_recipe(str(file))


def test_the_number_of_ranks_takes_part_in_the_rules():
    assert resolve_recipe("tiny", world=4)
    with pytest.raises(UserError, match=r"train\.global_batch = 8 .* 3 data-parallel ranks .* multiple of 6"):
        resolve_recipe("tiny", world=3)
    assert resolve_recipe("tiny", ["--train.global_batch=12"], world=3).train.global_batch == 12


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_written_down_and_read_again_is_itself(name: str, tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(config_as_yaml(PRESETS[name]()), encoding="utf-8")
    assert resolve_recipe(str(file)) == PRESETS[name]()


def test_a_tiny_form_is_a_preset_like_any_other_in_a_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: deepseek-v3-tiny\nmodel: {mtp: 2, attention: {window: 8}}\n")
    found = resolve_recipe(str(file))
    assert (found.name, found.model.mtp, found.model.attention.window) == ("deepseek-v3-tiny", 2, 8)
    assert found.model.attention.kind == "mla"


def test_a_finished_runs_own_configuration_is_a_recipe(tmp_path: Path):
    words = ["--name", "mine.run", "--optim.lr", "1e-5", "--data.source", "files"]
    config = resolve_recipe("olmoe-1b-7b", [*words, "--data.files", "a b.txt,~/c.jsonl"])
    file = tmp_path / "config.yaml"
    file.write_text(config_as_yaml(config), encoding="utf-8")
    assert resolve_recipe(str(file)) == config


PUBLISHED = list(filter(is_published_model, PRESETS))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_not_trained_with_a_batch_and_steps_that_nobody_gave(
    name: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command_line(["train", name, "--data.files", "nowhere"]) == 2
    refused = capsys.readouterr().err
    assert f"train.global_batch and train.steps of a run of {name} must be given, such as --train" in refused
    assert run_command_line(["train", name, "--train.steps", "10"]) == 2
    assert f"train.global_batch of a run of {name} must be given" in capsys.readouterr().err
    assert not unsaid_settings(name, ["--train.steps", "10", "--train.global_batch=64"])
    assert not unsaid_settings(f"{name}-tiny", [])


def test_a_file_may_give_them(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: deepseek-v3\ntrain: {steps: 5}\n")
    (problem,) = unsaid_settings(str(file), [])
    assert problem.startswith("train.global_batch of a run of deepseek-v3 must be given")
    assert "--train.global_batch 15360 --train.steps 235240 (as deepseek-v3 was trained)" in problem
    assert not unsaid_settings(str(file), ["--train.global_batch", "64"])
    file.write_text(config_as_yaml(PRESETS["deepseek-v3"]()))
    assert not unsaid_settings(str(file), []), "a run's own configuration is whole"
    assert not unsaid_settings("tiny", [])
