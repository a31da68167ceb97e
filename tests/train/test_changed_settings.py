"""Settings that may change when a run resumes: all but those that shape tensors. Changes are printed and recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.config.keys import ConfigKey, iterate_keys
from moefold.config.read import replace_values
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.config.run import Config
from moefold.layout.axes import single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.changed_settings import SHAPE_SETTINGS
from moefold.train.parity import random_corpus
from moefold.train.resume import run_tensors
from tests.support.runs import SMALL, command, corpus, metrics


def small_run(tmp_path: Path, *more: str) -> list[str]:
    return ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(tmp_path / "run"), *more]


def recorded(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "changes.jsonl").read_text().splitlines()]


CHANGES = {
    "model.moe.balance.bias_rate": "0.5",
    "model.moe.balance.z_loss": "0.001",
    "model.moe.balance.aux_loss": "0.01",
    "model.moe.capacity.factor": "1.5",
    "model.moe.router.jitter": "0.1",
    "model.attention.rope.scaling": "linear",
    "model.attention.rope.factor": "4.0",
    "model.attention.rope.theta": "50000.0",
    "model.attention.window": "16",
    "model.moe.top_k": "1",
}


def test_what_shapes_no_tensor_may_change_and_the_change_is_printed_and_recorded(tmp_path: Path):
    assert command(small_run(tmp_path, "--train.steps", "2"), tmp_path / "log")[0] == 0
    words = [word for key, value in CHANGES.items() for word in (f"--{key}", value)]
    code, output = command(small_run(tmp_path, "--train.steps", "4", "--resume", "auto", *words), tmp_path / "log")
    assert code == 0, output
    assert "note: model.moe.balance.z_loss = 0.001, but the checkpoint has 0.0" in output
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    (line,) = recorded(tmp_path)
    assert line["step"] == 2
    assert line["checkpoint"].endswith("step-00000002")
    assert line["changed"]["model.moe.balance.z_loss"] == {"from": 0.0, "to": 0.001}
    assert line["changed"].keys() == {*CHANGES, "train.steps"}
    # A step that is done again has the change of its last resume; an earlier change stays.
    again = small_run(tmp_path, "--train.steps", "6", "--resume", "auto", *words, "--model.moe.balance.z_loss", "0")
    assert command(again, tmp_path / "log")[0] == 0
    first, second = recorded(tmp_path)
    assert first == line
    assert second["changed"]["model.moe.balance.z_loss"] == {"from": 0.001, "to": 0.0}


def test_a_resume_without_changes_records_none(tmp_path: Path):
    argv = small_run(tmp_path, "--train.steps", "2")
    assert command(argv, tmp_path / "log")[0] == 0
    assert command([*argv, "--resume", "auto"], tmp_path / "log")[0] == 0
    assert not (tmp_path / "run" / "changes.jsonl").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("model.moe.ffn", "48"), ("model.attention.heads", "4"), ("train.precision", "bf16")]
)
def test_what_shapes_tensors_is_refused_by_key(key: str, value: str, tmp_path: Path):
    assert command(small_run(tmp_path, "--train.steps", "1"), tmp_path / "log")[0] == 0
    code, output = command(
        small_run(tmp_path, "--train.steps", "2", "--resume", "auto", f"--{key}", value), tmp_path / "log"
    )
    assert code == 2
    assert f"{key} = {value}, but the checkpoint has" in output
    assert not (tmp_path / "run" / "changes.jsonl").exists()


# ---- the list of settings against the model itself


def other_values(key: ConfigKey) -> Iterator[Any]:
    if key.choices:
        yield from (choice for choice in key.choices if choice != key.default)
    elif key.type is bool:
        yield not key.default
    elif key.type is int:
        yield from (key.default + 1, 2 * key.default, 4)
    elif key.type is float:
        yield from (key.default + 1.0, key.default + 0.01)


def variants(base: Config) -> Iterator[tuple[str, Config]]:
    """Legal configurations that differ from `base` in one key of the model."""
    for key in iterate_keys(base.model, "model."):
        for value in other_values(key):
            changed = replace_values(base, {key.path: value}, "")
            if value != key.default and not broken_rules(ConfigOnRanks(changed)):
                yield key.path, changed


def small(name: str) -> Config:
    config = PRESETS[name]()
    model = replace(config.model, hidden=32, vocab=256)
    return replace(config, model=model, data=replace(config.data, seq_len=32))


def shapes(config: Config, tmp_path: Path) -> dict[str, tuple[int, ...]]:
    run = assemble_run(config, single_rank_world(), tmp_path, corpus=random_corpus(config))
    return {name: tuple(tensor.shape) for name, tensor in run_tensors(run).items()}


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "gpt-oss-20b-tiny"])
def test_a_key_that_may_change_shapes_no_tensor(name: str, tmp_path: Path):
    base = small(name)
    expected = shapes(base, tmp_path)
    tried: set[str] = set()
    for path, changed in variants(base):
        if path not in SHAPE_SETTINGS:
            tried.add(path)
            assert shapes(changed, tmp_path) == expected, f"{path} shapes tensors"
    assert len(tried) > 20, sorted(tried)


def test_every_setting_of_the_list_is_a_key():
    known = {key.path for key in iterate_keys(PRESETS["tiny"]())}
    assert not set(SHAPE_SETTINGS) - known
