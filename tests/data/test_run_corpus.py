"""What `data.seq_len` cuts is told before a run as the run tells it at its start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from moefold.config.run import Config
from moefold.data import run_corpus
from moefold.data.run_corpus import foretold_cuts
from moefold.layout.axes import single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.loop import cut_lines
from tests.support.prepared import prepared
from tests.support.runs import SMALL

PACKED = ["--data.attend", "document", "--data.packing", "best_fit", "--data.held_out", "0.1"]


def write_pairs(path: Path) -> Path:
    pairs = [{"prompt": "p" * 4, "response": "r" * length} for length in (3, 40, 60)] * 20
    path.write_text("\n".join(map(json.dumps, pairs)))
    return path


def told_by_run(config: Config) -> list[str]:
    return cut_lines(assemble_run(config, single_rank_world(), Path(".")))


def test_what_is_cut_is_told_before_a_run_as_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = write_pairs(tmp_path / "pairs.jsonl")
    prepared(tmp_path / "out", file, format="pairs", held_out=0.1)
    sources = [
        ["--data.source", "files", "--data.files", str(file), "--data.format", "pairs"],
        ["--data.source", "prepared", "--data.files", str(tmp_path / "out")],
    ]
    for source in sources:
        words = [*SMALL, *PACKED, *source]
        config = resolve_recipe("tiny", words)
        told = foretold_cuts(config)
        assert told_by_run(config) == [f"warning: {told}"]
        assert str(told).endswith("; set data.seq_len to 64 for whole samples")
        assert run_command_line(["explain", "tiny", *words]) == 0
        assert f"samples: {told}" in " ".join(capsys.readouterr().out.split())
        whole = replace(config, data=replace(config.data, seq_len=64))
        assert str(foretold_cuts(whole)).startswith("data.seq_len = 64 cuts 0 of ")
        assert told_by_run(whole) == []
        assert foretold_cuts(replace(config, data=replace(config.data, packing="windows"))) is None
    # Files that a run would read for long, or that are elsewhere, do not keep the command from its answer.
    monkeypatch.setattr(run_corpus, "COUNTED_BYTES", 100)
    config = resolve_recipe("tiny", [*SMALL, *PACKED, *sources[0]])
    assert "moefold data show counts them with --data.seq_len 32" in str(foretold_cuts(config))
    file.unlink()
    assert "is not known: " in str(foretold_cuts(config))
