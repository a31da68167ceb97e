"""From words and YAML to a configuration and back."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError
from moefold.config.keys import iterate_keys
from moefold.config.read import (
    config_as_yaml,
    convert_value,
    flatten_sections,
    parse_overrides,
    read_yaml_mapping,
    with_values,
)
from moefold.config.run import Config, DataConfig, OptimConfig
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS

KEYS = {key.path: key for key in iterate_keys(Config())}


def read_back(config: Config) -> Config:
    problems: dict[str, str] = {}
    found = with_values(Config(), flatten_sections(yaml.safe_load(config_as_yaml(config))), problems)
    assert not problems, problems
    return found


def values(config: Config) -> dict[str, Any]:
    """By key, so that a difference is shown as that key."""
    return {key.path: key.default for key in iterate_keys(config)}


@pytest.mark.parametrize("name", PRESETS)
def test_yaml_out_and_in_gives_an_equal_configuration(name: str, tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(config_as_yaml(PRESETS[name]()), encoding="utf-8")
    assert values(resolve_recipe(str(file))) == values(PRESETS[name]())


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85"), max_size=20)
rates = st.floats(min_value=1e-300, max_value=100.0)


@settings(deadline=None)
@given(words, st.lists(words, max_size=3), words, rates, st.integers(1, 2**24))
def test_any_text_and_number_survives_yaml(name: str, files: list[str], key: str, lr: float, seq_len: int):
    data = DataConfig(source="files", files=tuple(files), text_key=key, tokenizer=name, seq_len=seq_len)
    config = Config(name=name, data=data, optim=OptimConfig(lr=lr))
    assert values(read_back(config)) == values(config)


def test_a_next_line_character_survives_yaml():
    config = Config(name="a\x85b")
    assert values(read_back(config)) == values(config)


def test_yaml_lays_its_keys_over_the_preset_it_names(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("preset: olmoe-1b-7b\ntrain:\n  steps: 7\nparallel.ep: 1\n")
    found = resolve_recipe(str(file))
    assert found.model == PRESETS["olmoe-1b-7b"]().model
    assert found.train.steps == 7
    file.write_text("train: {steps: 7}\n")
    assert values(resolve_recipe(str(file))) == {**values(PRESETS["tiny"]()), "train.steps": 7}
    file.write_text("")
    assert values(resolve_recipe(str(file))) == values(PRESETS["tiny"]()), "an empty file changes nothing"


def test_overrides_are_read_with_a_blank_or_an_equals_sign():
    assert parse_overrides(["--a.b", "1", "--c=2", "--d=x=y", "--e="]) == {"a.b": "1", "c": "2", "d": "x=y", "e": ""}
    assert parse_overrides(["--optim.lr", "-1", "--name", "--x"]) == {"optim.lr": "-1", "name": "--x"}
    assert values(resolve_recipe("tiny", ["--train.steps", "20"])) == values(
        resolve_recipe("tiny", ["--train.steps=20"])
    )
    assert resolve_recipe("tiny", ["--train.steps=20", "--train.steps=30"]).train.steps == 30, "the last word counts"


@pytest.mark.parametrize("words", [["train.steps"], ["--"], ["-x"], ["--train.steps", "3", "4"]])
def test_words_that_are_no_override_are_refused_with_the_form_expected(words: list[str]):
    with pytest.raises(UserError, match=f'cannot read "{words[-1]}"; expected --section.key value'):
        parse_overrides(words)


def test_an_override_without_a_value_is_refused():
    with pytest.raises(UserError, match=r"--train\.seed has no value; expected --train\.seed VALUE"):
        parse_overrides(["--train.steps", "3", "--train.seed"])


LEGAL = [
    ("train.steps", "20", 20),
    ("train.steps", "1_000", 1000),
    ("train.steps", 20, 20),
    ("optim.lr", "1e-3", 1e-3),
    ("optim.lr", 1, 1.0),
    ("optim.lr", "0.5", 0.5),
    ("model.tied_head", "true", True),
    ("model.tied_head", "No", False),
    ("model.tied_head", True, True),
    ("optim.decay", "wsd", "wsd"),
    ("name", "", ""),
    ("name", "été 🐍", "été 🐍"),
    ("data.files", "a, b,", ("a", "b")),
    ("data.files", ["a,b", "c"], ("a,b", "c")),
    ("data.files", "", ()),
]


@pytest.mark.parametrize(("path", "raw", "expected"), LEGAL)
def test_a_legal_value_becomes_the_type_of_its_key(path: str, raw: Any, expected: Any):
    found = convert_value(KEYS[path], raw)
    assert found == expected
    assert type(found) is type(expected)


ILLEGAL = [
    ("train.steps", 1.0),
    ("train.steps", 1.5),
    ("train.steps", True),
    ("train.steps", "1.0"),
    ("train.steps", "1e3"),
    ("train.steps", "true"),
    ("train.steps", ""),
    ("train.steps", "0"),
    ("train.steps", -1),
    ("train.steps", None),
    ("train.steps", [1]),
    ("train.seed", 2**62 + 1),
    ("optim.lr", "nan"),
    ("optim.lr", "inf"),
    ("optim.lr", "-inf"),
    ("optim.lr", float("nan")),
    ("optim.lr", float("inf")),
    ("optim.lr", 10**400),
    ("optim.lr", True),
    ("optim.lr", 0),
    ("optim.lr", "1e-999"),
    ("optim.lr", 101),
    ("optim.beta1", 1.0),
    ("optim.lr", "fast"),
    ("model.tied_head", 1),
    ("model.tied_head", "1"),
    ("model.tied_head", None),
    ("optim.decay", "Cosine"),
    ("optim.decay", 1),
    ("optim.decay", ["cosine"]),
    ("name", 5),
    ("name", None),
    ("data.files", 5),
    ("data.files", ["a", 5]),
]


@pytest.mark.parametrize(("path", "raw"), ILLEGAL)
def test_an_illegal_value_is_told_with_key_value_and_a_legal_one_and_changes_nothing(path: str, raw: Any):
    problems: dict[str, str] = {}
    assert values(with_values(Config(), {path: raw}, problems)) == values(Config())
    assert list(problems) == [path]
    assert problems[path].startswith(f"{path} = ")
    assert KEYS[path].expected_values in problems[path]


@pytest.mark.parametrize("raw", [0, False, {}])
def test_a_list_is_not_read_from_something_else_that_is_empty(raw: Any):
    with pytest.raises(ValueError):
        convert_value(KEYS["data.files"], raw)


@pytest.mark.parametrize("make", [Config, *PRESETS.values()], ids=["defaults", *PRESETS])
def test_the_value_named_as_legal_is_legal(make: Callable[[], Config]):
    """`such as X` shows the present value, so the defaults and every preset's own values must be legal."""
    for key in iterate_keys(make()):
        assert convert_value(key, key.default) == key.default, key.path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("train.steps", "a whole number at least 1 and at most 1e+09, such as 400"),
        ("optim.lr", "a number above 0 and at most 100, such as 0.003"),
        ("optim.decay", "one of cosine, wsd, constant"),
        ("model.tied_head", "true or false, such as false"),
        ("data.text_key", "a text, such as text"),
        ("data.files", "a list of texts, as a,b,c"),
    ],
)
def test_what_a_key_expects_is_said_in_words(path: str, words: str):
    assert KEYS[path].expected_values.startswith(words)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("parallel.eq", "parallel.ep"),
        ("train.step", "train.steps"),
        ("model.moe.topk", "model.moe.top_k"),
        ("model.attention.head_dims", "model.attention.head_dim"),
        ("Name", "name"),
        ("optim.learning_rate", "optim."),
        ("top_k", "model.moe.top_k"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(wrong: str, near: str):
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", [f"--{wrong}=1"])
    assert f'no key "{wrong}"' in str(refused.value)
    assert f'did you mean "{near}' in str(refused.value)


@pytest.mark.parametrize("wrong", ["topk", "kvheads"])
def test_the_key_suggested_for_a_misspelt_one_exists(wrong: str):
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", [f"--{wrong}=1"])
    assert any(f'did you mean "{path}"' in str(refused.value) for path in KEYS), refused.value


def test_a_section_given_as_a_key_is_refused_with_its_keys():
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", ["--model.moe=8"])
    assert "model.moe is a section" in str(refused.value)
    assert all(path in str(refused.value) for path in KEYS if path.startswith("model.moe."))


def test_all_problems_of_file_and_words_are_refused_together(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("train: {steps: 0, sed: 3}\nmodel: {attention: {heads: 4, kv_heads: 3}}\n")
    with pytest.raises(UserError) as refused:
        resolve_recipe(str(file), ["--optim.lr=nan", "--nme=x", "--data.source=files"])
    problems = refused.value.problems
    wanted = ["train.steps = 0", "train.sed", "model.attention.kv_heads = 3", "optim.lr = nan", '"nme"', "data.source"]
    assert len(problems) == len(wanted), problems
    assert all(any(part in line for line in problems) for part in wanted), problems


def test_a_rule_is_silent_when_one_of_its_keys_is_already_refused():
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", ["--model.attention.kv_heads=x", "--model.attention.heads=7"])
    assert len(refused.value.problems) == 1, refused.value


def test_a_file_that_is_no_mapping_or_cannot_be_read_is_refused_by_name(tmp_path: Path):
    contents = {
        "list": b"- a\n",
        "text": b"hello\n",
        "broken": b"a: [\n",
        "latin": b"name: \xff\n",
        "bell": b"name: \x07",
    }
    for name, content in contents.items():
        file = tmp_path / f"{name}.yaml"
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.yaml"):
            read_yaml_mapping(file)
    (tmp_path / "folder.yaml").mkdir()
    for path in (tmp_path / "folder.yaml", tmp_path / "absent.yaml"):
        with pytest.raises(UserError, match=path.name):
            read_yaml_mapping(path)


def test_what_a_message_quotes_is_printable_and_short():
    words = ["--train.steps=" + "9\x1b[31m\n\u202e\udcff" * 500, "--" + "\x00é" * 500 + "=1"]
    with pytest.raises(UserError) as refused:
        resolve_recipe("tiny", words)
    for line in refused.value.problems:
        assert line.isprintable(), repr(line)
        assert len(line) < 300


def test_what_a_rule_or_a_choice_quotes_is_printable():
    for recipe, words in (("tiny", ["--data.source=stdlib", "--data.files=a\x1b[31m\nb"]), ("\x1b[31m", [])):
        with pytest.raises(UserError) as refused:
            resolve_recipe(recipe, words)
        assert all(line.isprintable() for line in refused.value.problems), refused.value.problems


ODD_YAML = {
    "an empty tagged int": 'train: {steps: !!int ""}',
    "an empty tagged float": 'optim: {lr: !!float ""}',
    "a tagged time that is none": 'train: {steps: !!timestamp "x"}',
    "a tagged truth that is none": 'model: {tied_head: !!bool "x"}',
    "a mapping inside itself": "data: &d {files: *d}",
    "a number of 4,800 digits": f"train: {{seed: 0x{'f' * 4000}}}",
    "such a number for a float": f"optim: {{lr: 0x{'f' * 4000}}}",
}


@pytest.mark.parametrize("what", ODD_YAML)
def test_yaml_that_trips_its_own_reader_is_refused(what: str, tmp_path: Path):
    file = tmp_path / "odd.yaml"
    file.write_text(ODD_YAML[what])
    with pytest.raises(UserError):
        resolve_recipe(str(file))


def alias_bomb(entry: str) -> str:
    """Eight lines, each ten times the one before it: a hundred million values."""
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{n}: &a{n} {entry.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 9)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [alias_bomb("[{}]"), alias_bomb("{{<<: [{}]}}"), "data: &d {files: *d}", "a: " + "x" * 2_000_000],
    ids=["aliases", "merges", "itself", "length"],
)
def test_yaml_of_a_few_lines_that_means_millions_of_values_is_refused_before_they_are_made(text: str, tmp_path: Path):
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    begun = time.process_time()
    with pytest.raises(UserError, match=r"has (aliases that make )?more than|contains itself"):
        resolve_recipe(str(file))
    assert time.process_time() - begun < 2


def test_anchors_and_merges_of_a_common_size_are_read(tmp_path: Path):
    file = tmp_path / "merged.yaml"
    file.write_text("train: &t {steps: 7}\noptim: {<<: [{lr: 0.5}, {warmup: 3}], weight_decay: 0.2}\n")
    read = resolve_recipe(str(file))
    assert (read.train.steps, read.optim.lr, read.optim.warmup, read.optim.weight_decay) == (7, 0.5, 3, 0.2)


@pytest.mark.parametrize("words", [["--data.files=a.txt"], ["--data.files", "a.txt,b.jsonl"]])
def test_files_that_are_named_are_the_source_unless_another_is_named_too(words: list[str], tmp_path: Path):
    assert resolve_recipe("tiny", words).data.source == "files"
    (tmp_path / "x.yaml").write_text("data:\n  files: [a.txt]\n")
    assert resolve_recipe(str(tmp_path / "x.yaml")).data.source == "files"
    with pytest.raises(UserError, match=r"data\.files = .*but data\.source = stdlib"):
        resolve_recipe("tiny", [*words, "--data.source=stdlib"])
