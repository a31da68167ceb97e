"""`moefold bench generate`: steps of greedy generation, beside the bytes that they must read.

A step makes one token of every sequence. It reads all weights that the batch touches, each expert that some token has
chosen once, and the keys and values that are kept; their bytes over the time of a step are a share of the bandwidth of
a copy. Weights and prompts are random. On a CPU the tiny form of the model, as a smoke test.
"""

from __future__ import annotations

import importlib.util
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from moefold.bench.clock import copy_bandwidth
from moefold.bench.machine import first_line_of, free_device_memory, machine_facts, resolve_device
from moefold.bench.options import GenerateBenchOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import initialise_on_device, transformers_model
from moefold.config.errors import all_of
from moefold.config.run import Config, ParallelConfig
from moefold.generate.decode import decode_tokens
from moefold.generate.next_logits import CachedLogits, TokenIds, model_logits
from moefold.generate.replayed_steps import READ_TOGETHER
from moefold.generate.sampling import Sampling
from moefold.layout.axes import World, single_rank_world
from moefold.model.token_layout import TokenShard
from moefold.model.transformer import Transformer
from moefold.observe.profile import profile_device
from moefold.presets.zoo import PRESETS
from moefold.train.evaluation_config import evaluation_config
from moefold.train.from_hf import WeightFiller, build_to_evaluate

GREEDY = Sampling(0)
TURNS = 3
FIRST_TIMED = 2 + READ_TOGETHER  # tokens before: those that are made before the recording, and a first reading
EAGER_TOKENS = FIRST_TIMED + 10
SLOWEST = 12  # kernels that are told
GOALS = {("olmoe-1b-7b", 1): 1.5, ("olmoe-1b-7b", 32): 5.4}  # milliseconds of a step on an H200, at most
CAPTION = """milliseconds of a step: a token of every sequence. eager: without a recording.
dynamic, static: transformers' own generation, by its cache. busy: kernels of an eager step.
GB: weights that the batch touches, and kept keys and values. share: of the bandwidth of a copy."""

Prompts = list[TokenIds]
Chosen = dict[int, Tensor]  # expert ids by layer


def run_benchmark(options: GenerateBenchOptions) -> int:
    report = generate_report(options)
    return show_report(report, options.json, print_generate_report)


def generate_report(options: GenerateBenchOptions) -> Report:
    device = resolve_device(options.device)
    bandwidth = copy_bandwidth(device, 10)
    results: list[Row] = []
    report = machine_facts(device) | {"copy_gb_s": bandwidth / 1e9, "results": results}
    for name in all_of("preset", options.model, PRESETS):
        config = generate_config(name, device)
        rows = own_rows(name, config, options, bandwidth)
        free_device_memory(device)
        if options.theirs and importlib.util.find_spec("transformers"):
            time_theirs(rows, config, options)
            free_device_memory(device)
        results += rows
    return report


def generate_config(name: str, device: str) -> Config:
    config = PRESETS[name if device == "cuda" else f"{name}-tiny"]()
    train = replace(config.train, device=device)
    return replace(config, train=train)


def own_rows(name: str, config: Config, options: GenerateBenchOptions, bandwidth: float) -> list[Row]:
    """A row for each batch, told when it is measured."""
    length = options.prompt + options.tokens
    device = config.train.device
    alone = ParallelConfig()
    world = single_rank_world(device)
    evaluated = evaluation_config(config.model, alone, length, 1)
    executor = build_to_evaluate(evaluated, "auto", world, make_random_filler)
    model = executor.model
    source = model_logits(model)
    rows: list[Row] = []
    for batch in options.batch:
        prompts = random_prompts(config, batch, options.prompt)
        row: Row = {"model": name, "layers": config.model.layers, "batch": batch}
        row["goal"] = GOALS.get((name, batch)) if device == "cuda" else None
        row["milliseconds"] = own_milliseconds(source, prompts, options.tokens)
        row |= profiled_step(source, model, prompts)
        seconds = row["milliseconds"]["moefold"] / 1e3
        row["share"] = row["gigabytes"] * 1e9 / seconds / bandwidth
        rows.append(row)
        tell_progress(f"{name}, {batch} sequences: {row['milliseconds']['moefold']:.3f} ms a step, {row['share']:.0%}")
    return rows


def make_random_filler(config: Config, world: World) -> WeightFiller:
    return initialise_on_device


def random_prompts(config: Config, batch: int, length: int) -> Prompts:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length)
    ids_BS = torch.randint(config.model.vocab, shape, generator=generator)
    return ids_BS.tolist()


def own_milliseconds(source: CachedLogits, prompts: Prompts, tokens: int) -> dict[str, float]:
    """Of replayed steps and of eager ones; the same where nothing is recorded."""
    recorder = source.recorder
    times = [milliseconds_of_a_step(source, prompts, tokens) for _ in range(TURNS)]
    source.recorder = None
    eager = milliseconds_of_a_step(source, prompts, min(tokens, EAGER_TOKENS))
    source.recorder = recorder
    return {"moefold": median(times), "eager": eager}


def milliseconds_of_a_step(source: CachedLogits, prompts: Prompts, tokens: int) -> float:
    moments: list[float] = []
    for _ in decode_tokens(source, prompts, GREEDY, tokens):
        moments.append(time.perf_counter())
    return mean_step(moments)


def mean_step(moments: list[float]) -> float:
    """Milliseconds between tokens, from the first timed one on, given when each was read."""
    timed = moments[FIRST_TIMED - 1 :]
    elapsed = timed[-1] - timed[0]
    return elapsed / (len(timed) - 1) * 1e3


def profiled_step(source: CachedLogits, model: Transformer, prompts: Prompts) -> Row:
    """One eager step behind the prompts: gigabytes that it reads, the device's busy time, and its slowest kernels."""
    chosen: Chosen = {}
    most = len(prompts[0]) + 2
    tokens = [0] * len(prompts)
    with torch.no_grad():
        source.begin(prompts, most)
        with noted_choices(model, chosen):
            source.follow(tokens)
        with profile_device(source.device) as read_profile:
            source.follow(tokens)
        profile = read_profile()
    row: Row = {"gigabytes": bytes_read(model, source, chosen) / 1e9, "busy": profile.busy_seconds * 1e3}
    row["kernels"] = len(profile.kernels_run)
    seconds: dict[str, list[float]] = defaultdict(list)
    for kernel in profile.kernels_run:
        seconds[kernel.name[:60]].append(kernel.seconds)
    slowest = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    row["slowest"] = [[name, len(times), sum(times) * 1e3] for name, times in slowest[:SLOWEST]]
    return row


class noted_choices:
    """While entered, the experts that routers choose are noted by layer."""

    def __init__(self, model: Transformer, chosen: Chosen):
        self.loads = model.loads()
        self.chosen = chosen

    def __enter__(self) -> None:
        for load in self.loads:
            load.record = partial(self.note, load.layer)

    def __exit__(self, *_: object) -> None:
        for load in self.loads:
            load.record = None

    def note(self, layer: int, ids_TK: Tensor, _: TokenShard) -> None:
        self.chosen[layer] = ids_TK


def bytes_read(model: Transformer, source: CachedLogits, chosen: Chosen) -> float:
    """Of a step: weights outside of experts, experts that were chosen, and what is kept. Of the embedding a step reads
    a row for each sequence, unless the head is the same matrix."""
    total = 0.0
    for block in model.blocks:
        total += bytes_of(block)
        if block.layer in chosen:
            experts = block.moe.experts
            share = chosen[block.layer].unique().numel() / len(experts.down)
            total -= (1 - share) * bytes_of(experts)
    total += bytes_of(model.head)
    if model.model.tied_head:
        total += bytes_of(model.embedding)
    assert source.past is not None
    positions = int(source.past.position)
    for rooms in source.past.by_layer.values():
        for room in rooms:
            slots = room.shape[1]
            total += room.nbytes * min(positions, slots) / slots
    return total


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


# ---- transformers' own ----


def time_theirs(rows: list[Row], config: Config, options: GenerateBenchOptions) -> None:
    """Adds transformers' milliseconds to each row. What fails is told and left out."""
    model = transformers_model(config)
    model.eval()
    for row in rows:
        for cache in options.theirs:
            prompts = random_prompts(config, row["batch"], options.prompt)
            try:
                found = their_milliseconds(model, prompts, cache, options.tokens)
            except (RuntimeError, ValueError, TypeError) as error:
                tell_progress(f"transformers, {cache} cache: {first_line_of(error)}")
                continue
            row["milliseconds"][cache] = found
            tell_progress(f"transformers, {cache} cache, {row['batch']} sequences: {found:.3f} ms a step")


def their_milliseconds(model: Any, prompts: Prompts, cache: str, tokens: int) -> float:
    """Of greedy steps; each is read by the host, as transformers' loop does by itself."""
    from transformers import StoppingCriteriaList  # pyright: ignore[reportMissingImports]

    device = next(model.parameters()).device
    ids_BS = torch.tensor(prompts, device=device)
    moments: list[float] = []

    def note_moment(ids: Tensor, *_: Any, **__: Any) -> Tensor:
        int(ids[0, -1])  # waits for the step
        moments.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    model.generate(
        ids_BS,
        attention_mask=torch.ones_like(ids_BS),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        cache_implementation="static" if cache == "static" else None,
        stopping_criteria=StoppingCriteriaList([note_moment]),
    )
    return mean_step(moments)


# ---- the table ----


def print_generate_report(report: Report) -> None:
    heading = f"{report_heading(report)}; a copy: {report['copy_gb_s']:,.0f} GB/s"
    table = report_table(heading, caption=CAPTION)
    table.add_column("model, layers", no_wrap=True)
    contenders = list(dict.fromkeys(contenders_of(report["results"])))
    add_number_columns(table, "batch", *contenders, "busy", "goal", "GB", "share")
    for row in report["results"]:
        times = row["milliseconds"]
        cells = [f"{times[name]:.2f}" if name in times else "" for name in contenders]
        goal = f"{row['goal']:g}" if row["goal"] else ""
        figures = (f"{row['busy']:.2f}", goal, f"{row['gigabytes']:.2f}", f"{row['share']:.0%}")
        table.add_row(f"{row['model']}, {row['layers']}", str(row["batch"]), *cells, *figures)
    Console().print(table)


def contenders_of(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        yield from row["milliseconds"]
