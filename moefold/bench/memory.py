"""`moefold bench memory`: what memory policies cost and save, in training steps of one device.

A policy is written `recomputed regions > offloaded regions`. Parts:

    recompute   step time over that without policy, bytes that autograd keeps, peak
    offload     a long sequence: also bytes offloaded over (forward time x one-way bandwidth), the fall of the peak
                over bytes offloaded, and the share of the copies' time in which a kernel runs too
    longest     the longest sequence of one training step that fits

Beside each measured peak is the planner's. On a CPU the tiny forms of the models run, and peaks are not measured.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moefold.bench.clock import Work
from moefold.bench.machine import (
    GIB,
    first_line_of,
    free_device_memory,
    machine_facts,
    peak_device_gib,
    reset_peak_memory,
    resolve_device,
    synchronize_device,
)
from moefold.bench.options import MEMORY_PARTS, MemoryOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import LEAN_STATE, run_on_random_tokens, tokens_per_step
from moefold.config.read import with_values
from moefold.config.run import Config
from moefold.memory.offload import offloader_of
from moefold.observe.profile import StepProfile, profile_device
from moefold.plan.memory.machine_fit import choices_of_run
from moefold.plan.memory.peak_memory import plan_memory
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run
from moefold.train.host_duties import collect_garbage_manually
from moefold.train.step import take_next_step

MEMORY_CAPTION = """times: step time over that of the first row with the model. kept: GiB that autograd keeps of a
microbatch. hidden: bytes offloaded over forward time x bandwidth. fall: of the peak over bytes offloaded. beside: of
the copies' time, that in which a kernel runs."""
WARM_UP_STEPS = 2
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**24}
LEAST_ON_CPU = 256  # bytes of the smallest tensor that is offloaded in a tiny model
COPIES = ("Memcpy DtoH", "Memcpy HtoD")
LONG = 32_768
SPREAD = {"cuda": " > experts@0,experts@1-13/2", "cpu": " > experts@0"}  # half of the layers, to hide all copies
LONGEST = {"cuda": (280_000,), "cpu": (256, 512)}
# Of DeepSeek-V3, what one card holds: its attention, four layers, an eighth of the experts.
DEEPSEEK_LIKE = {"model.layers": 4, "model.moe.experts": 32, "model.moe.dense_layers": 1, "model.mtp": 0}


class MemoryCase(NamedTuple):
    model: str
    policy: str
    values: dict[str, Any]


def recompute_cases() -> Iterator[MemoryCase]:
    shape = {"data.seq_len": 4096, "train.micro_batch": 4, "train.global_batch": 4}
    for model, values, policies in (
        ("deepseek-v3", DEEPSEEK_LIKE, ("norm,activation,up",)),
        ("olmoe-1b-7b", {}, ("sar", "layer")),
        ("qwen3-30b-a3b", {"model.layers": 12}, ("layer",)),
    ):
        shaped = values | shape
        for policy in ("", *policies):
            yield MemoryCase(model, policy, shaped)


def offload_cases(device: str) -> Iterator[MemoryCase]:
    for policy in ("", SPREAD[device], " > experts", " > core,experts", " > layer"):
        yield MemoryCase("olmoe-1b-7b", policy, one_sequence(LONG))


def one_sequence(length: int) -> dict[str, Any]:
    return {"data.seq_len": length, "train.micro_batch": 1, "train.global_batch": 1}


def run_benchmark(options: MemoryOptions) -> int:
    report = memory_report(options)
    return show_report(report, options.json, print_memory_report)


def case_config(case: MemoryCase, device: str) -> Config:
    """The model of a case with its policy; on a CPU the preset's tiny form at its own shapes."""
    config = large_config(case) if device == "cuda" else tiny_config(case)
    recomputed, _, offloaded = case.policy.partition(" > ")
    recompute = region_names(recomputed)
    offload = region_names(offloaded)
    memory = replace(config.memory, recompute=recompute, offload=offload)
    train = replace(config.train, device=device, steps=1000)
    return replace(config, memory=memory, train=train)


def large_config(case: MemoryCase) -> Config:
    problems: dict[str, str] = {}
    preset = PRESETS[case.model]()
    config = with_values(preset, case.values, problems)
    assert not problems, problems
    optim = replace(config.optim, **LEAN_STATE)
    return replace(config, optim=optim)


def tiny_config(case: MemoryCase) -> Config:
    config = PRESETS[f"{case.model}-tiny"]()
    batch = case.values["train.micro_batch"]
    train = replace(config.train, micro_batch=batch, global_batch=batch)
    memory = replace(config.memory, offload_least=LEAST_ON_CPU)
    return replace(config, train=train, memory=memory)


def region_names(listed: str) -> tuple[str, ...]:
    names = listed.split(",")
    return tuple(filter(None, names))


def memory_report(options: MemoryOptions) -> Report:
    """Every row is printed when it is measured, and the report so far is written to the file `options.out`."""
    device = resolve_device(options.device)
    results: list[Row] = []
    report: Report = machine_facts(device) | {"results": results}
    parts = options.part or MEMORY_PARTS
    report["bandwidth"] = one_way_bandwidth(device) if "offload" in parts else None
    for part in parts:
        for row in rows_of_part(part, device, options, report):
            results.append(row)
            tell_progress(row_text(row))
            if options.out:
                text = json.dumps(report, indent=1)
                options.out.write_text(text)
    return report


def rows_of_part(part: str, device: str, options: MemoryOptions, report: Report) -> Iterator[Row]:
    if part == "longest":
        lengths = options.length or LONGEST[device]
        yield from longest_rows(device, lengths)
        return
    cases = recompute_cases() if part == "recompute" else offload_cases(device)
    plain: dict[str, Row] = {}
    for case in cases:
        if options.model and case.model not in options.model:
            continue
        measured = measured_row(case, device, options.steps)
        row = {"part": part, **measured}
        first = plain.setdefault(case.model, row)
        compare_with_plain(row, first, report["bandwidth"])
        yield row


def measured_row(case: MemoryCase, device: str, steps: int) -> Row:
    """Figures of one case; where memory runs out, the reason."""
    config = case_config(case, device)
    policy = case.policy.strip() or "none"
    tokens = tokens_per_step(config)
    row: Row = {"model": case.model, "policy": policy, "tokens": tokens}
    row["planned_gib"] = planned_gib(config)
    try:
        row |= measured_figures(config, steps)
    except torch.OutOfMemoryError as error:
        row["failed"] = first_line_of(error)
    free_device_memory(device)
    return row


def planned_gib(config: Config) -> float:
    choices = choices_of_run(config)
    [rank] = plan_memory(config, 1, choices)
    return rank.total / GIB


def measured_figures(config: Config, steps: int) -> Row:
    device = config.train.device
    needed = steps + WARM_UP_STEPS + 3
    run = run_on_random_tokens(config, needed)
    take_steps(run, WARM_UP_STEPS)
    synchronize_device(device)
    offloader = offloader_of(run.model)
    before = offloaded_bytes(run)
    reset_peak_memory(device)
    with collect_garbage_manually():
        work = partial(take_steps, run, steps)
        seconds = timed(device, work) / steps
    offloaded = offloaded_bytes(run) - before
    refused = offloader.refused_bytes if offloader else 0
    row = speed_figures(seconds, tokens_per_step(config))
    row["peak_gib"] = peak_device_gib(device)
    row["offloaded_gib"] = offloaded / steps / GIB
    row["refused_gib"] = refused / GIB
    row |= forward_figures(run)
    if offloader:
        row["beside"] = copies_beside_kernels(run)
    run.gradients.remove_hooks()
    return row


def copies_beside_kernels(run: Run) -> float | None:
    """Of the time of a step's copies between device and host, the share beside kernels."""
    with profile_device(run.world.device) as read_profile:
        take_next_step(run)
    return share_beside_kernels(read_profile())


def share_beside_kernels(profile: StepProfile) -> float | None:
    """Of the time of copies, the share in which some kernel runs too; None without copies."""
    is_copy = [kernel.name.startswith(COPIES) for kernel in profile.kernels_run]
    copies = list(compress(profile.kernels_run, is_copy))
    kernels = list(compress(profile.kernels_run, map(not_, is_copy)))
    stretches = replace(profile, kernels_run=kernels).busy_stretches()
    busy = [(start, end) for start, end, _ in stretches]
    beside = 0.0
    for copy in copies:
        for start, end in busy:
            common = min(end, copy.end) - max(start, copy.start)
            beside += max(0.0, common)
    whole = sum(copy.end - copy.start for copy in copies)
    return beside / whole if copies else None


def take_steps(run: Run, steps: int) -> None:
    for _ in range(steps):
        take_next_step(run)


def speed_figures(seconds: float, tokens: int) -> Row:
    return {"step_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}


def timed(device: str, work: Work) -> float:
    begun = time.perf_counter()
    work()
    synchronize_device(device)
    return time.perf_counter() - begun


def offloaded_bytes(run: Run) -> int:
    offloader = offloader_of(run.model)
    if offloader is None:
        return 0
    return offloader.copied_bytes - offloader.returned_bytes


class KeptTensor:
    """A saved tensor for as long as autograd holds it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


def forward_figures(run: Run) -> Row:
    """Time of a microbatch's forward, and the bytes that autograd keeps of it on the device, each storage once."""
    held: list[weakref.ref[KeptTensor]] = []

    def pack(tensor: Tensor) -> KeptTensor:
        kept = KeptTensor(tensor)
        held.append(weakref.ref(kept))
        return kept

    model = run.model
    train = run.config.train
    batch = run.loader.next_batch()
    [part] = batch.microbatches(train.micro_batch)
    [stage] = model.stages
    steps = model.steps(stage)
    carry = model.begin(part.tokens_BS, part.labels_BS, part.first, part.begins_BS, filled_B=part.filled_B)
    synchronize_device(train.device)
    begun = time.perf_counter()
    with saved_tensors_hooks(pack, attrgetter("tensor")):
        for step in steps:
            carry = step.run(carry)
    synchronize_device(train.device)
    seconds = time.perf_counter() - begun
    alive = [reference() for reference in held]
    tensors = [kept.tensor for kept in alive if kept]
    kept_gib = bytes_beside(model.parameters(), tensors) / GIB
    return {"forward_ms": 1e3 * seconds, "kept_gib": kept_gib}


def bytes_beside(weights: Iterable[Tensor], tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each once, without those of weights."""
    sizes: dict[int, int] = {}
    for weight in weights:
        storage = weight.untyped_storage()
        sizes[storage.data_ptr()] = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
    return sum(sizes.values())


def one_way_bandwidth(device: str) -> float:
    """Bytes a second of copies to the host: the best of five."""
    size = COPIED_BYTES[device]
    pinned = device == "cuda"
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    copy = partial(target.copy_, source, non_blocking=True)
    synchronize_device(device)
    seconds = [timed(device, copy) for _ in range(5)]
    return size / min(seconds)


def compare_with_plain(row: Row, plain: Row, bandwidth: float | None) -> None:
    if "failed" in row or "failed" in plain:
        return
    row["times"] = row["step_ms"] / plain["step_ms"]
    offloaded = row["offloaded_gib"]
    if not offloaded:
        return
    if bandwidth is not None:
        forward = plain["forward_ms"] / 1e3
        could_leave = forward * bandwidth / GIB
        row["hidden"] = offloaded / could_leave
    if row["peak_gib"] is not None:
        fallen = plain["peak_gib"] - row["peak_gib"]
        row["fall"] = fallen / offloaded


def longest_rows(device: str, lengths: tuple[int, ...]) -> Iterator[Row]:
    """One step at each length, the shortest first, until memory runs out."""
    for length in sorted(lengths):
        values = one_sequence(length)
        case = MemoryCase("olmoe-1b-7b", "layer > layer", values)
        config = case_config(case, device)
        data = replace(config.data, seq_len=length)
        config = replace(config, data=data)
        row: Row = {"part": "longest", "model": case.model}
        row["policy"] = case.policy
        row["tokens"] = length
        row["planned_gib"] = planned_gib(config)
        try:
            row |= figures_of_one_step(config)
        except torch.OutOfMemoryError as error:
            row["failed"] = first_line_of(error)
        free_device_memory(device)
        yield row
        if "failed" in row:
            return


def figures_of_one_step(config: Config) -> Row:
    device = config.train.device
    run = run_on_random_tokens(config, 2)
    synchronize_device(device)
    reset_peak_memory(device)
    take_step = partial(take_next_step, run)
    seconds = timed(device, take_step)
    row = speed_figures(seconds, config.data.seq_len)
    row["peak_gib"] = peak_device_gib(device)
    run.gradients.remove_hooks()
    return row


def row_text(row: Row) -> str:
    shown: list[str] = []
    for name in FIGURES:
        figure = row.get(name)
        if isinstance(figure, float):
            shown.append(f"{name} {figure:.3g}")
    figures = ", ".join(shown)
    case = f"{row['part']}: {row['model']}, {row['tokens']} tokens, {row['policy']}"
    return f"{case}: {row.get('failed', figures)}"


FIGURES = {  # column of each figure
    "step_ms": "ms",
    "times": "times",
    "tokens_per_s": "tokens/s",
    "kept_gib": "kept",
    "offloaded_gib": "offloaded",
    "hidden": "hidden",
    "fall": "fall",
    "beside": "beside",
    "peak_gib": "peak",
    "planned_gib": "planned",
}


def print_memory_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=MEMORY_CAPTION)
    table.add_column("model, tokens", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    add_number_columns(table, *FIGURES.values())
    for row in report["results"]:
        figures = map(row.get, FIGURES)
        cells = list(map(figure_cell, figures))
        if "failed" in row:
            cells[0] = "out of memory"
        case = f"{row['model']}, {row['tokens']}"
        table.add_row(case, row["policy"], *cells)
    Console().print(table)


def figure_cell(figure: Any) -> str:
    return f"{figure:.4g}" if isinstance(figure, float) else ""
