"""Whole runs of a pipeline through the command's own entry: they train as one rank does, leave a trace that can be laid
beside the simulated one, and go on at another pp after being killed."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import run_command_line
from tests.support.runs import SMALL, command, corpus, metrics, start

STEPS = 8
MODEL = ["--model.layers", "4", "--train.steps", str(STEPS), "--checkpoint.every", "3", "--train.precision", "fp64"]
MODEL += ["--train.micro_batch", "1", "--train.validate_every", "4", "--optim.warmup", "2"]
TOLERANCE = 1e-9  # of losses, in fp64, over all steps


def words(tmp_path: Path, name: str, *more: str) -> list[str]:
    return ["train", "tiny", *SMALL, *corpus(tmp_path), *MODEL, "--out", str(tmp_path / name), *more]


def start_ranks(argv: list[str], size: int, folder: Path) -> list[Any]:
    """Each rank as a launcher would start it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(argv, folder / f"log-{rank}", {k: str(v) for k, v in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()})
        for rank in range(size)
    ]


def finish(ranks: list[Any], folder: Path) -> str:
    for rank in ranks:
        rank.join(120)
    said = (folder / "log-0").read_text()
    texts = "\n".join((folder / f"log-{rank}").read_text() for rank in range(len(ranks)))
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), texts
    return said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank unbroken, and a pipeline beside it."""
    folder = tmp_path_factory.mktemp("runs")
    code, output = command(words(folder, "one"), folder / "log")
    assert code == 0, output
    more = ["--parallel.pp", "2", "--parallel.ep", "2", "--pipeline.vpp", "2", "--observe.profile", "true"]
    said = finish(start_ranks(words(folder, "piped", *more), 4, folder), folder)
    assert "4 ranks" in said
    assert "a sample:\ndef " in said
    return folder


def agree(mine: Path, one: Path) -> None:
    a, b = metrics(mine), metrics(one)
    assert [line["step"] for line in a] == [line["step"] for line in b] == list(range(STEPS + 1))
    for left, right in zip(a, b, strict=True):
        for name in ("loss", "val_loss", "grad_norm"):
            assert (name in left) == (name in right)
            if name in left:
                assert left[name] == pytest.approx(right[name], rel=TOLERANCE), f"{name} of step {left['step']}"
        for name in ("max_violation", "load_entropy", "dead_experts", "drop_rate"):
            assert left.get(name) == pytest.approx(right.get(name)), f"{name}: all layers of all stages, in order"


@pytest.mark.extended
def test_a_pipeline_with_experts_spread_has_the_losses_and_loads_of_one_rank(runs: Path):
    agree(runs / "piped", runs / "one")


def simulated(folder: Path) -> list[dict[str, Any]]:
    options = [
        "--schedule",
        "1f1b",
        "--pp",
        "2",
        "--vpp",
        "2",
        "--microbatches",
        "4",
        "--trace",
        str(folder / "s.json"),
    ]
    assert run_command_line(["simulate", *options]) == 0
    return json.loads((folder / "s.json").read_text())["traceEvents"]


def run_trace(folder: Path) -> list[dict[str, Any]]:
    """The lanes that a simulation has too; the profile's own, steps and operations, lie below them."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "compute"}
    return [e for e in events if e["name"].startswith("process_") or (e["pid"], e["tid"]) in lanes]


def test_a_run_writes_a_trace_in_the_format_of_the_simulated_one(runs: Path, tmp_path: Path):
    ran = run_trace(runs / "piped")
    wanted = simulated(tmp_path)
    for kind in ("X", "M"):
        assert {tuple(e) for e in ran if e["ph"] == kind} == {tuple(e) for e in wanted if e["ph"] == kind}
    assert {e["args"]["name"] for e in ran if e["name"] == "process_name"} == {f"rank {i}" for i in range(4)}
    done, ops = ([e for e in events if e["ph"] == "X"] for events in (ran, wanted))
    assert min(e["ts"] for e in done) >= 0.0
    assert {e["name"] for e in done} == {e["name"] for e in ops}
    for rank in range(4):  # two data-parallel ranks for each of the pipeline's
        assert {e["name"] for e in done if e["pid"] == rank} == {e["name"] for e in ops if e["pid"] == rank // 2}


def test_a_trace_holds_every_op_of_one_step_once(runs: Path):
    events = run_trace(runs / "piped")
    counts = Counter((e["pid"], e["name"]) for e in events if e["ph"] == "X")
    twice = sorted(key for key, count in counts.items() if count > 1)
    assert not twice, f"more than once: {twice}"


@pytest.mark.extended
def test_killed_and_resumed_at_another_pp_and_vpp_it_gives_the_losses_of_an_unbroken_run_on_one_rank(runs: Path):
    shape = ["--parallel.pp", "2", "--parallel.ep", "2", "--pipeline.vpp", "2"]
    ranks = start_ranks(words(runs, "killed", *shape), 4, runs)
    latest, reached = runs / "killed" / "checkpoints" / "latest", runs / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (latest.exists() and reached.read_text().count("\n") > 4) and time.monotonic() < deadline:
        assert all(rank.is_alive() for rank in ranks), "it ended before it could be killed"
        time.sleep(0.005)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
    assert metrics(runs / "killed")[-1]["step"] < STEPS
    other = ["--parallel.pp", "4", "--pipeline.schedule", "zb_h1", "--resume", "auto"]
    said = finish(start_ranks(words(runs, "killed", *other), 4, runs), runs)
    assert "resumed from" in said
    agree(runs / "killed", runs / "one")
