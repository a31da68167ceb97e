"""`moefold bench packing`: whole training steps on documents that are packed, beside whole sequences and padded rows.

    whole    rows that one document fills
    packed   documents of log-normal length in bins, attention within them
    padded   one such document in each row, padding behind it

All three have rows of the same length. A packed step should be faster than a whole one by 70 % of the attention time
that the mask removes: the pairs of a query and a key that are hidden, by the borders of the batches timed. A padded
step takes as long as a whole one for fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import PackingOptions
from moefold.bench.played_ring import random_heads, timed, whole_sequence
from moefold.bench.report import Report, Row, add_number_columns, report_heading, report_table, show_report
from moefold.bench.ring_blocks import MEAN_DOCUMENT, BlockMask
from moefold.bench.step import (
    STEP_GOALS,
    WARM_UP_STEPS,
    initialise_on_device,
    step_bench_config,
    time_training_steps,
    tokens_per_step,
)
from moefold.config.errors import one_of
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.data.loader import Batch
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.train.assemble import Run, assemble_run, choose_kernels
from moefold.train.step import StepReport, train_step

FULL_ROW = 4096  # tokens, of which a document has 700 on average; shorter rows have shorter documents
SIGMA = 1.0
GOAL = 0.7  # of the attention time that the mask removes
SPARE = 3  # batches of text beside those of the steps: of the look-ahead, and those that bins leave


class TimedSteps(NamedTuple):
    """Milliseconds of a step, its tokens without padding, and the share of causal pairs that its mask hides."""

    milliseconds: float
    tokens: float
    removed: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.milliseconds * 1e3


def run_benchmark(options: PackingOptions) -> int:
    report = packing_report(options)
    return show_report(report, options.json, print_packing_report)


def packing_report(options: PackingOptions) -> Report:
    device = resolve_device(options.device)
    name = one_of("model", options.model, STEP_GOALS)
    config = step_bench_config(name, device)
    ways: dict[str, Callable[[int], TimedSteps]] = {
        "whole": partial(time_steps, config),
        "packed": partial(time_steps, with_packing(config)),
        "padded": partial(time_padded_steps, config),
    }
    timings: dict[str, TimedSteps] = {}
    for way, time_way in ways.items():
        timings[way] = time_way(options.steps)
        free_device_memory(device)  # behind the run, which holds its own until then
    attention = attention_milliseconds(config)
    whole, packed = timings["whole"], timings["packed"]
    saved = GOAL * packed.removed * attention
    goal = packed.tokens / (whole.milliseconds - saved) * 1e3
    rows: list[Row] = [{"way": way, **each._asdict(), "speed": each.tokens_per_s} for way, each in timings.items()]
    found: Report = {"model": options.model, "attention": attention, "goal": goal, "results": rows}
    return machine_facts(device) | found


def with_packing(config: Config) -> Config:
    return replace(config, data=replace(config.data, packing="best_fit", attend="document"))


def document_lengths(config: Config, tokens: int) -> np.ndarray:
    """Of about so many tokens together, log-normal, none longer than a row."""
    row = config.data.seq_len
    mean = MEAN_DOCUMENT * row / FULL_ROW
    median = mean / np.exp(SIGMA**2 / 2)
    count = 1 + int(tokens / mean)
    drawn = np.random.default_rng(0).lognormal(np.log(median), SIGMA, count)
    return drawn.astype(int).clip(2, row)


def run_on_documents(config: Config, steps: int) -> Run:
    """A run on random tokens; packed, in documents."""
    tokens = tokens_per_step(config) * (steps + WARM_UP_STEPS + SPARE)
    starts = None
    if config.data.packing != "windows":
        lengths = document_lengths(config, 2 * tokens)
        tokens = int(lengths.sum())
        starts = np.cumsum([0, *lengths[:-1]])
    ids = np.random.default_rng(0).integers(0, config.model.vocab, size=tokens + 1, dtype=np.uint32)
    corpus = Corpus(ids, ids) if starts is None else Corpus(ids[:-1], ids[:-1], starts, starts)
    world = single_rank_world(config.train.device)
    return assemble_run(config, world, Path("."), corpus, initialise_on_device)


def time_steps(config: Config, steps: int) -> TimedSteps:
    """Of a loader's batches."""
    run = run_on_documents(config, steps)
    batches: list[Batch] = []

    def next_step() -> StepReport:
        batches.append(run.loader.next_batch())
        return train_step(run, batches[-1])

    timing = time_training_steps(next_step, attrgetter("loss"), run.config, steps)
    run.gradients.remove_hooks()
    last = batches[-steps:]
    filled = [1 - (batch.waste or 0.0) for batch in last]
    removed = [removed_share(batch.begins_BS) for batch in last]
    tokens = tokens_per_step(config) * sum(filled) / steps
    return TimedSteps(timing.milliseconds, tokens, sum(removed) / steps)


def time_padded_steps(config: Config, steps: int) -> TimedSteps:
    """Of batches whose rows have one document each."""
    run = run_on_documents(config, steps)
    device = run.world.device
    rows, length = config.train.global_batch, config.data.seq_len
    lengths = document_lengths(config, tokens_per_step(config))[:rows]
    batch = run.loader.next_batch()
    is_padding = torch.arange(length, device=device) >= torch.as_tensor(lengths, device=device)[:, None]
    labels_BS = batch.labels_BS.masked_fill(is_padding, IGNORE_INDEX)
    padded = replace(batch, labels_BS=labels_BS)
    timing = time_training_steps(partial(train_step, run, padded), attrgetter("loss"), run.config, steps)
    run.gradients.remove_hooks()
    return TimedSteps(timing.milliseconds, float(lengths.sum()))


def removed_share(begins_BS: Tensor | None) -> float:
    """Of the pairs that causal attention has, those whose key is in an earlier document."""
    if begins_BS is None:
        return 0.0
    hidden = begins_BS.double().mean()
    positions = begins_BS.shape[1]
    return (hidden / ((positions + 1) / 2)).item()


def attention_milliseconds(config: Config) -> float:
    """Of all layers, forward and backward, in one step on whole sequences."""
    world = single_rank_world(config.train.device)
    precision = "bf16" if config.train.device == "cuda" else "fp32"
    kernels: BoundKernels = choose_kernels(replace(config, train=replace(config.train, precision=precision)), world)
    shape = kernels.facts.attention
    assert shape is not None
    heads = random_heads(shape, kernels.facts, config.train.global_batch)
    work = whole_sequence(heads, BlockMask(0), kernels)
    return config.model.layers * timed(work, config.train.device)


def print_packing_report(report: Report) -> None:
    attention = f"attention of whole sequences: {report['attention']:.1f} ms a step"
    caption = f"{attention}. goal: {report['goal']:,.0f} tokens/s packed"
    table = report_table(f"{report_heading(report)}: {report['model']}", "rows", caption=caption)
    add_number_columns(table, "ms a step", "tokens", "tokens/s", "pairs hidden")
    for row in report["results"]:
        cells = (f"{row['milliseconds']:.1f}", f"{row['tokens']:,.0f}", f"{row['speed']:,.0f}", f"{row['removed']:.1%}")
        table.add_row(row["way"], *cells)
    Console().print(table)
