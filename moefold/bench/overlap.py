"""`moefold bench overlap`: how much of experts' communication hides behind compute, on two CPU ranks.

Each exchange of rows is made to take as long as asked, as a slow network would. Three ways of the same step, in one
run: one microbatch after the other; a forward paired with a backward; and weight gradients split off to fill gaps.
Exposed is the time in which the compute lane waits for travel, or travels itself.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from moefold.config.errors import UserError
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.spawn import run_local_ranks
from moefold.observe.trace import SpanRecorder, TraceEvent, write_trace
from moefold.presets.command_options import read_options
from moefold.presets.zoo import PRESETS

if TYPE_CHECKING:
    from moefold.layout.axes import World

RANKS = 2
OVERLAP_WAYS = {
    "one after the other": PipelineConfig(),
    "paired": PipelineConfig(pair=True, fill=False),
    "paired, weight gradients fill gaps": PipelineConfig(pair=True),
}


@dataclass(frozen=True)
class OverlapOptions:
    """Show how much of the travel to experts hides behind compute, on two CPU ranks with a slow network."""

    delay_ms: float = 10.0
    """How long each exchange of rows takes at least."""
    microbatches: int = 16
    """Of one step."""
    json: bool = False
    """Print JSON instead of a table."""
    trace: Path | None = None
    """Write what both ranks did, in the last way, for Perfetto."""
    found: Path | None = None
    """Where ranks leave what they measured; set by the command for the ranks it starts."""


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(OverlapOptions, argv, "bench overlap", config_keys=False)
    if options.delay_ms < 0 or options.microbatches < 2:
        raise UserError("--delay-ms must be at least 0 and --microbatches at least 2; such as 10 and 16")
    if options.found:
        return measure_every_way(options)
    with tempfile.TemporaryDirectory(prefix="moefold-overlap-") as folder:
        if code := run_local_ranks(["bench", "overlap", *argv, "--found", folder], RANKS):
            return code
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    results = overlap_summary(found)
    print(json.dumps(results, indent=1)) if options.json else print_overlap_table(results, options)
    if options.trace:
        write_trace(options.trace, [TraceEvent(**event) for rank in found for event in rank["events"]])
    return 0


def overlap_summary(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of a step by way, the mean over ranks."""

    def mean_over_ranks(way: str, key: str) -> float:
        return sum(rank["ways"][way][key] for rank in found) / len(found)

    both = {way: {key: mean_over_ranks(way, key) for key in ("step", "exposed")} for way in OVERLAP_WAYS}
    first = both["one after the other"]["exposed"]
    return {way: {**values, "hidden": 1 - values["exposed"] / max(first, 1e-9)} for way, values in both.items()}


def print_overlap_table(results: dict[str, dict[str, float]], options: OverlapOptions) -> None:
    title = f"{options.microbatches} microbatches, {options.delay_ms:g} ms an exchange, 2 CPU ranks; ms of one step"
    table = Table("way", title=title, title_justify="left")
    for column in ("step", "exposed", "hidden"):
        table.add_column(column, justify="right")
    for way, values in results.items():
        table.add_row(way, *(f"{values[key] * 1e3:.0f}" for key in ("step", "exposed")), f"{values['hidden']:.1%}")
    Console().print(table)


def overlap_config(microbatches: int) -> Config:
    config = PRESETS["tiny"]()
    train = replace(config.train, device="cpu", precision="fp32", global_batch=RANKS * microbatches, micro_batch=1)
    parallel = ParallelConfig(ep=RANKS, dispatcher="all_to_all")
    wider = replace(config.model, layers=2, hidden=256)  # so that a step of it takes longer than an exchange
    return replace(config, train=train, parallel=parallel, model=wider, data=replace(config.data, seq_len=512))


def measure_every_way(options: OverlapOptions) -> int:
    import torch

    from moefold.layout.process_groups import joined_world

    torch.set_num_threads(1)
    config, ways, events = overlap_config(options.microbatches), dict[str, Any](), list[TraceEvent]()
    with joined_world(config.parallel, "cpu") as world, slowed_all_to_all(options.delay_ms / 1e3) as spans:
        for way, pipeline in OVERLAP_WAYS.items():
            ways[way], events = measure_overlap(replace(config, pipeline=pipeline), world, spans)
        start = events[0].start if events else 0.0
        shown = [asdict(replace(e, start=e.start - start, end=e.end - start)) for e in events]
        assert options.found is not None
        (options.found / f"{world.rank}.json").write_text(json.dumps({"ways": ways, "events": shown}))
    return 0


def measure_overlap(config: Config, world: World, exchanges: SpanRecorder) -> tuple[dict[str, float], list[TraceEvent]]:
    """Seconds of a step and of exposed travel, after one step to warm up."""
    from moefold.train.assemble import assemble_run
    from moefold.train.parity import random_corpus
    from moefold.train.step import train_step

    run = assemble_run(config, world, Path("."), random_corpus(config))
    train_step(run, run.loader.next_batch())
    exchanges.events.clear()
    run.executor.spans.start_recording()
    begun = time.perf_counter()
    train_step(run, run.loader.next_batch())
    seconds = time.perf_counter() - begun
    events = sorted(run.executor.spans.events, key=lambda event: event.start)
    waited = [event for event in events if event.lane == "waiting"]
    exposed = sum(event.end - event.start for event in [*waited, *exchanges.events])
    return {"step": seconds, "exposed": exposed}, [event for event in events if event.lane != "waiting"]


@contextmanager
def slowed_all_to_all(seconds: float) -> Iterator[SpanRecorder]:
    """Every exchange of rows takes at least so long. Those that hold up the compute lane are noted."""
    from moefold.comm import collectives

    quick, main = collectives.all_to_all_no_grad, threading.main_thread()
    spans = SpanRecorder(0, recording=True)

    def slow_all_to_all(x: Any, send: Sequence[int], receive: Sequence[int], axis: Any, what: str = "rows") -> Any:
        if what != "rows":
            return quick(x, send, receive, axis, what)
        begun = time.time()
        result = quick(x, send, receive, axis, what)
        time.sleep(max(0.0, begun + seconds - time.time()))
        if threading.current_thread() is main:
            spans.events.append(TraceEvent(0, "comm", "exchange", begun, time.time()))
        return result

    collectives.all_to_all_no_grad = slow_all_to_all
    try:
        yield spans
    finally:
        collectives.all_to_all_no_grad = quick
