"""Attention is chosen by what was measured, what was learnt is remembered, and runs that shall repeat do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.kernels.attention import timings
from moefold.kernels.attention.timings import known_times, remember_times, timing_cache_path, timing_key
from moefold.kernels.catalog import pick_implementation
from moefold.kernels.facts import AttentionShape, Facts, attention_sees_all, attention_shape, facts_from_config
from moefold.presets.recipe import resolve_recipe

SHAPE = AttentionShape(8192, 24, 3, 128, 128)
CARD = (9, 0)


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timings, "LEARNT", {})


def chosen(repeatable: bool, shape: AttentionShape | None = SHAPE) -> tuple[str, str]:
    return pick_implementation(
        "attention", Facts("cuda", "bf16", CARD, attention=shape, repeatable=repeatable, triton=True)
    )


@pytest.mark.parametrize("best", ["cudnn", "flash", "deterministic"])
def test_the_quickest_measured_way_is_taken_and_the_times_are_told(best: str):
    remember_times(CARD, SHAPE, {"cudnn": 3.0, "flash": 3.0, "deterministic": 3.0} | {best: 1.5})
    name, why = chosen(repeatable=False)
    assert name == best
    assert f"8192 positions, 24/3 heads of 128, ms of forward and backward for 16384 tokens: {best} 1.50" in why


def test_a_run_that_shall_repeat_takes_sums_in_a_fixed_order_however_long_they_take():
    remember_times(CARD, SHAPE, {"cudnn": 1.0, "flash": 2.0, "deterministic": 9.0})
    assert chosen(repeatable=True)[0] == "deterministic"
    assert chosen(repeatable=False)[0] == "cudnn"


def test_what_was_learnt_outlasts_the_process_unless_the_file_is_broken(monkeypatch: pytest.MonkeyPatch):
    remember_times(CARD, SHAPE, {"cudnn": 1.0})
    monkeypatch.setattr(timings, "LEARNT", {})
    assert known_times(CARD, SHAPE) == {"cudnn": 1.0}
    assert known_times((8, 0), SHAPE) == {}
    for broken in ("{", "[]", ""):
        timing_cache_path().write_text(broken)
        assert known_times(CARD, SHAPE) == {}
    remember_times(CARD, SHAPE, {"cudnn": 2.0})
    assert known_times(CARD, SHAPE) == {"cudnn": 2.0}


def test_times_that_an_earlier_version_wrote_are_read_under_the_names_now():
    timing_cache_path().parent.mkdir(parents=True)
    timing_cache_path().write_text(json.dumps({timing_key(CARD, SHAPE): {"ordered": 2.0, "cudnn": 3.0, "flash": 4.0}}))
    assert known_times(CARD, SHAPE) == {"deterministic": 2.0, "cudnn": 3.0, "flash": 4.0}
    assert chosen(repeatable=False)[0] == "deterministic"


def test_a_place_that_cannot_be_written_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember_times(CARD, SHAPE, {"cudnn": 1.0})
    assert known_times(CARD, SHAPE) == {"cudnn": 1.0}


def test_shapes_are_those_of_a_rank_and_only_of_attention_that_sees_all_before_it():
    assert attention_shape(resolve_recipe("qwen3-30b-a3b")) == AttentionShape(4096, 32, 4, 128, 128)
    assert attention_shape(resolve_recipe("qwen3-30b-a3b", ["--parallel.tp=4"], 4)) == AttentionShape(
        4096, 8, 1, 128, 128
    )
    assert attention_shape(resolve_recipe("deepseek-v3")) == AttentionShape(4096, 128, 128, 192, 128)
    assert attention_shape(resolve_recipe("gpt-oss-20b")) == AttentionShape(4096, 64, 8, 64, 64)


@pytest.mark.parametrize(
    ("name", "override", "all_"),
    [
        ("qwen3-30b-a3b", "--data.attend=sequence", True),
        ("qwen3-30b-a3b", "--data.attend=document", False),
        ("qwen3-30b-a3b", "--model.attention.sinks=true", False),
        ("qwen3-30b-a3b", "--model.attention.window=128", False),
        ("gpt-oss-20b", "--data.attend=sequence", False),
    ],
)
def test_documents_windows_and_sinks_are_for_a_way_that_takes_them_on_a_gpu(name: str, override: str, all_: bool):
    config = resolve_recipe(name, [override])
    assert attention_sees_all(config) == all_
    for repeatable in (True, False):
        facts = Facts("cuda", "bf16", CARD, attention=SHAPE, sees_all=all_, repeatable=repeatable, triton=True)
        assert (pick_implementation("attention", facts)[0] == "varlen") == (not all_)
    assert pick_implementation("attention", Facts("cpu", "fp32", attention=SHAPE, sees_all=all_))[0] == "sdpa"
    without = Facts("cuda", "bf16", CARD, attention=SHAPE, sees_all=False, triton=False)
    assert pick_implementation("attention", without)[0] == "sdpa"
    assert chosen(True, None)[0] == "sdpa"


LATENT = AttentionShape(4096, 128, 128, 192, 128)


@pytest.mark.parametrize(
    ("capability", "repeatable", "expected"),
    [(CARD, True, "deterministic"), (CARD, False, "deterministic"), ((8, 0), True, "varlen"), ((8, 6), True, "sdpa")],
)
def test_values_narrower_than_keys_get_sums_in_a_fixed_order_where_runs_repeat(capability, repeatable, expected):
    """Flash needs both alike; cuDNN's backward adds up in any order, and is slower."""
    facts = Facts("cuda", "bf16", capability, attention=LATENT, repeatable=repeatable, triton=True)
    assert pick_implementation("attention", facts)[0] == expected


@pytest.mark.parametrize("positions", [1 << 19, 1 << 22])
def test_sequences_of_more_than_two_billion_elements_have_the_same_kernels(positions: int):
    long = SHAPE._replace(length=positions)
    facts = Facts("cuda", "bf16", CARD, attention=long, triton=True)
    assert pick_implementation("attention", facts)[0] == "deterministic"
    assert pick_implementation("attention_block", facts)[0] == "hopper"
    masked = replace(facts, sees_all=False)
    assert pick_implementation("attention", masked)[0] == "varlen"


def test_a_cpu_has_torchs_attention():
    assert pick_implementation("attention", Facts("cpu", "fp32", attention=SHAPE))[0] == "sdpa"


CONTEXTS = [("all_gather", "varlen"), ("all_to_all", "deterministic"), ("ring", "deterministic")]


@pytest.mark.parametrize(("context", "expected"), CONTEXTS)
def test_fewer_queries_than_keys_get_a_way_that_adds_up_in_a_fixed_order(context: str, expected: str):
    """Gathered keys went to torch's attention before, whose backward has no fixed order."""
    parts = ["--parallel.cp=2", f"--parallel.context={context}"]
    config = resolve_recipe("qwen3-30b-a3b", parts, 2)
    facts = replace(facts_from_config(config, "cuda", "bf16", CARD), triton=True)
    assert pick_implementation("attention", facts)[0] == expected


def test_what_does_not_repeat_is_said_to_where_runs_should():
    for facts in (
        Facts("cuda", "bf16", CARD, attention=LATENT, triton=False),
        Facts("cuda", "bf16", CARD, attention=SHAPE, square=False, triton=False),
        Facts("cuda", "fp32", CARD, attention=SHAPE, triton=True),
    ):
        name, why = pick_implementation("attention", facts)
        assert name in ("sdpa", "cudnn")
        assert "runs may not repeat to the bit, though kernels.repeatable asks for it" in why
    _, why = pick_implementation("attention", Facts("cpu", "fp32", attention=SHAPE))
    assert "repeat" not in why
