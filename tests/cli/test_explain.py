"""`moefold explain` as data and as tables."""

import json
from typing import Any

import pytest

from moefold.anatomy.counts import active_parameters, total_parameters, train_flops_per_token
from moefold.cli.explain import human
from moefold.cli.main import run
from moefold.kernels.bind import bind
from moefold.kernels.catalog import CATALOG, facts_of
from moefold.kernels.registry import OPS
from moefold.presets.recipe import resolve
from moefold.presets.zoo import PRESETS


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]):
    def explain(*words: str) -> dict[str, Any]:
        assert run(["explain", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return explain


def steps_of(found: dict[str, Any], kind: str) -> list[str]:
    return [step["step"] for layer in found["layers"] if layer["kind"] == kind for step in layer["steps"]]


@pytest.mark.parametrize("name", PRESETS)
def test_json_holds_what_the_anatomy_says(name: str, explained: Any):
    found, config = explained(name), PRESETS[name]()
    assert set(found) == {
        "name",
        "parameters",
        "active_parameters",
        "train_flops_per_token",
        "seq_len",
        "facts",
        "grids",
        "dispatcher",
        "layers",
        "kernels",
    }
    assert found["name"] == name
    assert found["parameters"] == total_parameters(config.model)
    assert found["active_parameters"] == active_parameters(config.model)
    assert found["train_flops_per_token"] == train_flops_per_token(config.model, config.data.seq_len)
    steps = [(layer["count"], step) for layer in found["layers"] for step in layer["steps"]]
    assert sum(count * step["parameters"] for count, step in steps) == found["parameters"]
    assert 3 * sum(count * step["forward_flops_per_token"] for count, step in steps) == pytest.approx(
        found["train_flops_per_token"]
    )


def test_each_kind_of_layer_is_shown_once_with_its_number(explained: Any):
    found = explained("tiny", "--model.moe.dense_layers", "1", "--model.moe.shared_ffn", "64")
    kinds = [(layer["kind"], layer["count"]) for layer in found["layers"]]
    assert kinds == [("embedding", 1), ("dense layer", 1), ("MoE layer", 3), ("head", 1)]
    assert steps_of(found, "dense layer") == ["attend", "mlp"]
    assert steps_of(found, "MoE layer") == ["attend", "route", "dispatch", "shared", "experts", "combine"]
    assert steps_of(explained("tiny"), "MoE layer") == ["attend", "route", "dispatch", "experts", "combine"]


def test_the_grids_are_those_of_that_many_ranks(explained: Any):
    found = explained("tiny", "--nproc", "4")
    assert found["grids"]["dense"] == {"pp": 1, "dp": 4, "cp": 1, "tp": 1}
    assert found["grids"]["expert"] == {"pp": 1, "edp": 4, "ep": 1, "etp": 1}


@pytest.mark.parametrize("nproc", ["0", "-4"])
def test_a_number_of_ranks_below_one_is_refused(nproc: str, capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "tiny", "--nproc", nproc]) == 2
    assert f"--nproc {nproc} is not legal" in capsys.readouterr().err


@pytest.mark.parametrize("force", [[], ["attention=reference"], ["grouped_gemm=reference", "cross_entropy=reference"]])
def test_the_kernels_shown_are_those_a_run_binds(force: list[str], explained: Any):
    words = ["--train.device", "cpu", *(["--kernels.force", ",".join(force)] if force else [])]
    found = explained("tiny", *words)
    kernels = bind(facts_of(resolve("tiny"), "cpu", "fp32"), force)
    assert set(found["kernels"]) == {op for op in CATALOG if not op.startswith("attention_block")}
    for op in found["kernels"]:
        assert OPS[op].implementations[found["kernels"][op]["implementation"]] is getattr(kernels, op)
        assert found["kernels"][op]["why"]
    for text in force:
        op, _, name = text.partition("=")
        assert found["kernels"][op] == {"implementation": name, "why": "asked for"}


@pytest.mark.parametrize(("force", "near"), [("atention=sdpa", "attention"), ("attention=spda", "sdpa"), ("x", "")])
def test_an_unknown_kernel_is_refused_with_the_nearest(force: str, near: str, capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "tiny", "--kernels.force", force]) == 2
    message = capsys.readouterr().err
    assert f'did you mean "{near}"' in message or not near
    assert "there are: " in message


def test_the_table_tells_name_sizes_and_every_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["explain", "qwen3-30b-a3b"]) == 0
    shown = capsys.readouterr().out
    for part in ("qwen3-30b-a3b", "30.5 G parameters", "3.35 G active", "48 x MoE layer", "length 4096", "T,2048"):
        assert part in shown, part
    assert all(step in shown for step in ("embed", "attend", "route", "dispatch", "experts", "combine", "predict"))
    assert all(op in shown for op in CATALOG if not op.startswith("attention_block"))
    assert "attention_block" not in shown, "nothing goes round a ring of one"


@pytest.mark.parametrize("name", ["[/nope]", "../up", "a/b", ".hidden", "x" * 100])
def test_a_name_that_cannot_be_a_folders_is_refused_and_shown(name: str, capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "tiny", "--name", name]) == 2
    assert f"name = {name[:70]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (46_702_792_704, "46.7 G"), (264_192, "264 k"), (1.2e13, "12 T")]
)
def test_numbers_are_short(number: float, text: str):
    assert human(number) == text
