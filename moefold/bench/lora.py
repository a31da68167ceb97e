"""`moefold bench lora`: training steps of adapters beside a frozen base, within a limit of device memory.

Qwen3-30B-A3B with all its layers and random weights in bf16, rank 16 at attention and all experts, sequences of 4,096.
Steps are the ordinary trainer's, update included. On a GPU the limit is imposed: torch refuses memory beyond it.
Configuration keys behind the options change every case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from rich.console import Console

from moefold.anatomy.host_experts import experts_on_host
from moefold.bench.machine import GIB, first_line_of, free_device_memory, held_device_gib, machine_facts, resolve_device
from moefold.bench.options import LoraOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import (
    WARM_UP_STEPS,
    StepTiming,
    random_tokens,
    time_training_steps,
    timing_text,
    tokens_per_step,
)
from moefold.config.errors import all_of
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.model.initialise import parameter_slices
from moefold.model.transformer import Transformer
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.step import take_next_step

MODEL = "qwen3-30b-a3b"
HOST_LINK = 55e9  # bytes/s from host memory to an H200, one way
SHARE_OF_LINK = 0.75
CAPTION = """tokens/s of whole steps: forward, backward, clipping, update. goal: at least.
peak: GiB of tensors, without those inside of a graph. held: GiB that the allocator
has taken, graphs included. limit: of what it may take, imposed."""
ADAPTERS = ("--lora.rank=16", "--model.moe.balance.bias_rate=0", "--optim.lr=1e-4", "--train.precision=bf16")
LEAN = ("--optim.main=split", "--optim.moments=bf16")
FOUR = ("--train.global_batch=4", "--train.micro_batch=4", "--optim.gradients=bf16")
TWO_PARTS = ("--train.global_batch=4", "--train.micro_batch=2")
ONE = ("--train.global_batch=1", "--train.micro_batch=1", "--optim.gradients=bf16")
GRAPH = "--memory.graphs=whole"
IN_NF4 = ("--lora.base=nf4", "--optim.main=split", "--optim.moments=int8")
SMALLEST = (*IN_NF4, "--memory.recompute=layer", GRAPH)


@dataclass(frozen=True)
class LoraCase:
    """Keys of a run, GiB that it may take, and tokens/s that it should reach on an H200; None: as the host link lets
    it."""

    keys: tuple[str, ...]
    limit_gib: float
    tokens_per_s: float | None


CASES = {
    "bf16": LoraCase((*LEAN, *FOUR, "--memory.recompute=norm,experts@0-11"), 115, 20_000),
    "microbatches": LoraCase((*LEAN, *TWO_PARTS, "--memory.recompute=layer"), 76, 15_000),
    "nf4": LoraCase((*ONE, *SMALLEST), 24, 10_000),
    "host": LoraCase((*LEAN, *FOUR, "--memory.recompute=layer", "--memory.offload=expert_weights"), 24, None),
}


def run_benchmark(options: LoraOptions) -> int:
    report = lora_report(options)
    return show_report(report, options.json, print_lora_report)


def lora_report(options: LoraOptions) -> Report:
    """Each case in turn, told when it is measured. A case that runs out of memory says so, and the next begins."""
    device = resolve_device(options.device)
    results: list[Row] = []
    report = machine_facts(device) | {"results": results}
    for name in all_of("case", options.case, CASES) or CASES:
        case = CASES[name]
        config = case_config(case, device, options.overrides)
        row: Row = {"case": name, "limit_gib": case.limit_gib, "goal": goal_of(case, config)}
        row |= measured(config, case, options.steps)
        results.append(row)
        free_device_memory(device)
        tell_progress(f"{name}: {row['text']}")
    return report


def case_config(case: LoraCase, device: str, overrides: tuple[str, ...] = ()) -> Config:
    """On a CPU the tiny form of the model, as a smoke test: what is said of some layers is said of all."""
    on_device = f"--train.device={device}"
    if device == "cuda":
        words = [*ADAPTERS, *case.keys, "--data.seq_len=4096", on_device, *overrides]
        return resolve_recipe(MODEL, words, 1)
    keys = [key.partition("@")[0] for key in case.keys if key != GRAPH]
    return resolve_recipe(f"{MODEL}-tiny", [*ADAPTERS, *keys, on_device, *overrides], 1)


def goal_of(case: LoraCase, config: Config) -> float:
    """Where the host link sets the pace, every microbatch fetches all experts twice."""
    if case.tokens_per_s is not None:
        return case.tokens_per_s
    passes = 2 * config.train.global_batch // config.train.micro_batch
    fetched = passes * sum(layer.bytes for layer in experts_on_host(config))
    return SHARE_OF_LINK * tokens_per_step(config) * HOST_LINK / fetched


def measured(config: Config, case: LoraCase, steps: int) -> Row:
    try:
        timing = time_case(config, case.limit_gib, steps)
    except torch.OutOfMemoryError as error:
        return {"text": f"out of memory: {first_line_of(error)}"}
    held = held_device_gib(config.train.device)
    return {**timing._asdict(), "held_gib": held, "text": timing_text(timing)}


def time_case(config: Config, limit_gib: float, steps: int) -> StepTiming:
    if config.train.device == "cuda":
        _, there = torch.cuda.mem_get_info()
        share = limit_gib * GIB / there
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    tokens = random_tokens(config, steps + WARM_UP_STEPS + 1)
    world = single_rank_world(config.train.device)
    run = assemble_run(config, world, Path("."), Corpus(tokens, tokens), draw_on_device)
    timing = time_training_steps(partial(take_next_step, run), attrgetter("loss"), config, steps)
    run.gradients.remove_hooks()
    return timing


@torch.no_grad()
def draw_on_device(model: Transformer) -> None:
    """Random weights of the declared spread, drawn on the device a matrix at a time and held where they lie."""
    torch.manual_seed(0)
    for _, parameter, held in parameter_slices(declared_parameters(model)):
        declaration = parameter.declaration
        shape = parameter.tensor.shape[declaration.stacked :]
        values = parameter.tensor.new_empty(shape)
        if declaration.std:
            values.normal_(0.0, declaration.std)
        else:
            values.fill_(1.0 if declaration.std is None else 0.0)
        held.copy_(values)


def print_lora_report(report: Report) -> None:
    table = report_table(report_heading(report), caption=CAPTION)
    table.add_column("case", no_wrap=True)
    add_number_columns(table, "tokens/s", "goal", "peak", "held", "limit")
    for row in report["results"]:
        speed = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else "out of memory"
        peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else ""
        held = f"{row['held_gib']:.1f}" if "held_gib" in row else ""
        table.add_row(row["case"], speed, f"{row['goal']:,.0f}", peak, held, f"{row['limit_gib']:g}")
    Console().print(table)
