"""`moefold bench overlap` as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.bench.overlap import OVERLAP_WAYS, exposed_seconds, measure_overlap, overlap_config, slowed_all_to_all
from moefold.cli.main import run_command_line
from moefold.layout.axes import World
from moefold.observe.trace import TraceEvent
from tests.support.machine_speed import slowness
from tests.support.ranks import run_ranks


@pytest.mark.extended
def test_it_tells_what_is_exposed_in_each_way_as_json_and_writes_a_trace(tmp_path: Path):
    argv = ["--delay-ms", "4", "--microbatches", "3", "--json", "--trace", str(tmp_path / "trace.json")]
    done = subprocess.run([sys.executable, "-m", "moefold", "bench", "overlap", *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == list(OVERLAP_WAYS)
    for way in found.values():
        assert set(way) == {"step", "experts", "exposed", "hidden"}
        assert way["step"] > 0
        assert way["exposed"] >= 0
    assert found["one after the other"]["hidden"] == 0
    layers, directions = 2, 2
    assert found["one after the other"]["exposed"] >= 3 * layers * 2 * directions * 0.004, "every exchange is exposed"
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["cat"] for e in events} == {"compute", "comm"}


def best_exposed_share(world: World, delay: float) -> float:
    """Of the exchanges of a step of four row chunks with shared experts, the exposed share: the least of a few steps,
    from which other processes of the machine have taken the least. `delay`: seconds of an exchange of all rows."""
    config = OVERLAP_WAYS["one after the other, 4 row chunks, with shared experts"].changed(
        overlap_config(1, is_narrow=True)
    )
    config = replace(config, model=replace(config.model, layers=1))
    rows = config.data.seq_len * config.model.moe.top_k
    shares: list[float] = []
    with slowed_all_to_all(delay, rows) as exchanges:
        for _ in range(5):
            seconds, _ = measure_overlap(config, world, exchanges, 2 * delay)
            sent = [event.end - event.start for event in exchanges.events]
            shares.append(seconds["exposed"] / sum(sent))
    return min(shares)


@pytest.mark.alone
def test_shared_experts_and_row_chunks_hide_seven_tenths_of_exchanges_as_long_as_their_compute():
    """Exchanges and compute take as long as they do beside the host's own work on a machine of usual speed."""
    delay = 0.06 * slowness()
    for exposed in run_ranks(best_exposed_share, 2, delay, ep=2):
        assert exposed <= 0.3, f"{1 - exposed:.0%} hidden"


def span(lane: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(0, lane, "", start, end)


def test_only_waits_during_an_exchange_expose_it():
    """The compute lane also waits for other work of the comm lane: plans, gathers and sums of rows."""
    waits = [span("waiting", 0, 2), span("waiting", 3, 4), span("waiting", 6, 9)]
    assert exposed_seconds(span("comm", 1, 7), waits) == 1 + 1 + 1
    assert exposed_seconds(span("comm", 4, 6), waits) == 0
    assert exposed_seconds(span("compute", 1, 7), waits) == 6


@pytest.mark.parametrize("words", [["--delay-ms", "-1"], ["--experts-ms", "-1"], ["--microbatches", "1"]], ids=str)
def test_nonsense_is_refused_before_ranks_start(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["bench", "overlap", *words]) == 2
    assert "--delay-ms must be at least 0 and --microbatches at least 2" in capsys.readouterr().err
