"""Summary of a run for a page, read from the run's folder and downsampled to the resolution of a page.

config.yaml     the run's configuration       -> facts (run_facts.py)
metrics.jsonl   one line per step             -> curves, and maps of layers x steps (metric_series.py)
router.jsonl    one line every few steps      -> the load of layers x experts x steps, one byte each (load_series.py)
fp8.jsonl       one line every few steps      -> maps of layers x steps of each kind of FP8 operand (fp8_summary.py)
times.jsonl     one line every few steps      -> facts (rank_times_summary.py)
faults.jsonl, restarts.jsonl                  -> faults (fault_list.py)
evaluations.jsonl                             -> results of `moefold eval` (evaluations.py)

Files are read on from where they were last read, in memory proportional to the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moefold.config.errors import UserError, printable_text
from moefold.config.run import Config
from moefold.presets.recipe import recipe_base
from moefold.web.downsample import NOTHING_TOLD
from moefold.web.evaluations import read_evaluations
from moefold.web.fault_list import FaultList
from moefold.web.fp8_summary import Fp8Series
from moefold.web.growing_file import GrowingFile
from moefold.web.load_series import LoadSeries
from moefold.web.metric_series import MetricSeries
from moefold.web.page_numbers import JsonObject
from moefold.web.rank_times_summary import RankTimesSummary
from moefold.web.run_facts import describe_run, moe_layer_numbers, tokens_per_step

MAX_MAP_COLUMNS = 400  # of all runs' maps together
MIN_MAP_COLUMNS = 100
MAX_LOAD_CELLS = 2_000_000  # of all runs' loads together: a byte each, four thirds of that in the page


class ToldSteps(NamedTuple):
    """What a page has been told of a run: of which reading of the files, up to which step of each, how many faults."""

    reading: int = NOTHING_TOLD
    metrics: int = NOTHING_TOLD
    router: int = NOTHING_TOLD
    fp8: int = NOTHING_TOLD
    faults: int = 0


class RunSummary:
    """One of `runs` runs, as far as its files were read. Each reading of the files from their start has a number."""

    def __init__(self, folder: Path, label: str, runs: int, first_reading: int = 0):
        self.folder = folder
        self.label = printable_text(label)
        self.map_columns = max(MIN_MAP_COLUMNS, MAX_MAP_COLUMNS // runs)
        self.load_cells = MAX_LOAD_CELLS // runs
        self.config: Config | None = None
        self.unknown_keys: list[str] = []
        self.reading = first_reading
        self.forget_files()

    def forget_files(self) -> None:
        """Begin to read the files from their start."""
        self.reading += 1
        self.metrics_file = GrowingFile(self.folder / "metrics.jsonl")
        self.router_file = GrowingFile(self.folder / "router.jsonl")
        self.fp8_file = GrowingFile(self.folder / "fp8.jsonl")
        self.faults = FaultList(self.folder)
        self.times = RankTimesSummary(self.folder)
        self.metrics = MetricSeries(self.map_columns)
        self.load = LoadSeries(self.load_cells)
        self.fp8 = Fp8Series(self.map_columns // 2)

    def read_config(self) -> None:
        unknown_keys: dict[str, str] = {}
        self.config = recipe_base(str(self.folder / "config.yaml"), unknown_keys)
        self.unknown_keys = [printable_text(key) for key in unknown_keys]

    def read_new(self) -> None:
        """Read what the files have gained; all of them from their start where one was written anew."""
        files = self.metrics_file, self.router_file, self.fp8_file, self.times.file, *self.faults.files
        if any(file.has_changed_before() for file in files):
            self.forget_files()
        for record in self.metrics_file.new_records():
            self.metrics.add_record(record)
        for record in self.router_file.new_records():
            self.load.add_record(record)
        for record in self.fp8_file.new_records():
            self.fp8.add_record(record)
        self.faults.read_new()
        self.times.read_new()

    def told_now(self) -> ToldSteps:
        return ToldSteps(
            reading=self.reading,
            metrics=self.metrics.last_step,
            router=self.load.last_step,
            fp8=self.fp8.last_step,
            faults=self.faults.count,
        )

    def page_data(self, told: ToldSteps) -> JsonObject:
        """The run as plain data for the page, without the columns that the page was told."""
        is_whole = told.reading != self.reading
        if is_whole:
            told = ToldSteps()
        config = self.config
        layers = self.load.layers
        if config and not layers:
            layers = moe_layer_numbers(config)
        return {
            "label": self.label,
            "told": self.told_now(),
            "whole": is_whole,
            "facts": self.describe_facts(),
            "strange": self.unknown_keys,
            "tokens_per_step": tokens_per_step(config) if config else 0,
            "last": self.metrics.last_values(),
            "curves": self.metrics.curve_data(told.metrics),
            "layers": layers,
            "maps": self.metrics.map_data(told.metrics),
            "load": self.load.load_data(told.router),
            "fp8": self.fp8.operand_data(told.fp8),
            "faults": self.faults.fault_data(),
            "evaluations": read_evaluations(self.folder),
        }

    def describe_facts(self) -> list[tuple[str, str]]:
        if self.config is None:
            return []
        step = max(0, self.metrics.last_step)
        times = ("times of ranks", self.times.describe())
        return [*describe_run(self.config, step), ("restarts", self.faults.describe_restarts()), times]


def summarize_run(folder: Path, label: str, runs: int) -> JsonObject:
    """Summary of one of `runs` runs, as plain data for the page."""
    summary = RunSummary(folder, label, runs)
    summary.read_config()
    summary.read_new()
    if summary.metrics.last_step < 0:
        path = folder / "metrics.jsonl"
        raise UserError(f"{path} holds no step; expected one line per step: train first, or wait for the first line")
    return summary.page_data(ToldSteps())
