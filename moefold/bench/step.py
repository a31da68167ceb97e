"""`moefold bench step`: whole training steps of known models on one device, moefold's and transformers'.

moefold's steps are the ordinary trainer's: assembled as by `moefold train`, main weights in fp32; with --graphs whole,
they are replays, but for those that record FP8 operands, which are as frequent as in a run. transformers is set
as its users set it: weights and AdamW's moments in bf16, grouped_mm experts, sdpa. Both read the same random tokens.
TFLOP/s count the model's FLOPs, as `moefold explain` does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from moefold.anatomy.model_totals import train_flops_per_token
from moefold.bench.machine import (
    free_device_memory,
    machine_facts,
    peak_device_gib,
    reset_peak_memory,
    resolve_device,
    synchronize_device,
)
from moefold.bench.options import GraphKind, StepOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.timed_recipes import (
    PrecisionKeys,
    changed_keys,
    keys_of_report,
    recipes_in,
    recipes_title,
    with_precision_keys,
)
from moefold.bench.versions import installed_version
from moefold.checkpoint.hf.config_json import config_json_for, family_for_model
from moefold.config.errors import all_of
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.model.transformer import Transformer
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.host_duties import collect_garbage_manually
from moefold.train.step import take_next_step
from moefold.train.step_profile import profile_step, profile_text, write_profile_trace

WARM_UP_STEPS = 4
STEP_CAPTION = """tokens/s of whole steps: forward, backward, clipping, update. goal: at least.
peak: GiB of device memory. most: at most. HF: transformers' tokens/s. times: ours over it."""
LEAN_STATE = {"main": "split", "moments": "bf16", "gradients": "bf16"}


@dataclass(frozen=True)
class StepGoal:
    """Layers of a model that are run, and the speed and memory that a step of them should reach on an H200."""

    layers: int
    tokens_per_s: float
    peak_gib: float


STEP_GOALS = {
    "olmoe-1b-7b": StepGoal(16, 56_000, 99.9),
    "qwen3-30b-a3b": StepGoal(12, 62_000, 113.7),
    "mixtral-8x22b": StepGoal(2, 58_000, 51.4),
}


StepTimer = Callable[[], "StepTiming"]
TrainOn = Callable[[Tensor], Tensor]  # ids_BS -> loss
TakeStep = Callable[[], Any]
LossOf = Callable[[Any], float]


class StepTiming(NamedTuple):
    milliseconds: float
    tokens_per_s: float
    tflops: float
    peak_gib: float
    first_loss: float
    last_loss: float


def run_benchmark(options: StepOptions) -> int:
    report = step_report(options)
    return show_report(report, options.json, print_step_report)


def step_bench_config(name: str, device: str) -> Config:
    """The preset's own shapes at 4 sequences of 4096; on a CPU the preset's tiny form, as a smoke test."""
    cuda = device == "cuda"
    config = PRESETS[name if cuda else f"{name}-tiny"]()
    one_batch = replace(config.train, global_batch=4, micro_batch=4)
    train = replace(one_batch, device=device, steps=1000)
    optim = replace(config.optim, lr=1e-4)
    if not cuda:
        return replace(config, train=train, optim=optim)
    goal = STEP_GOALS[name]
    model = replace(config.model, layers=goal.layers)
    lean = replace(optim, **LEAN_STATE)
    return replace(config, model=model, train=train, optim=lean)


def with_graphs(config: Config, graphs: GraphKind) -> Config:
    """The configuration with steps as graphs; refused where no run may have them."""
    memory = replace(config.memory, graphs=graphs)
    return check_config(replace(config, memory=memory), 1)


def random_tokens(config: Config, steps: int) -> np.ndarray:
    count = tokens_per_step(config) * steps + 1
    generator = np.random.default_rng(0)
    vocab = config.model.vocab
    return generator.integers(0, vocab, size=count, dtype=np.uint32)


def tokens_per_step(config: Config) -> int:
    return config.train.global_batch * config.data.seq_len


def run_on_random_tokens(config: Config, steps: int) -> Run:
    tokens = random_tokens(config, steps)
    corpus = Corpus(tokens, tokens)
    world = single_rank_world(config.train.device)
    return assemble_run(config, world, Path("."), corpus, initialise_on_device)


@torch.no_grad()
def initialise_on_device(model: Transformer) -> None:
    """Random weights of the declared spread, drawn on the device. A run draws its weights on the CPU, which takes
    longer, so that they are the same on every device."""
    torch.manual_seed(0)
    for parameter in declared_parameters(model):
        std = parameter.declaration.std
        if std:
            parameter.tensor.normal_(0.0, std)
        else:
            value = 1.0 if std is None else 0.0
            parameter.tensor.fill_(value)


def time_moefold_steps(config: Config, steps: int, profile: Path | None) -> StepTiming:
    """Timing of moefold's steps; one more step is profiled into the folder `profile`."""
    if profile:
        profile.mkdir(parents=True, exist_ok=True)
    needed = steps + WARM_UP_STEPS + 2
    run = run_on_random_tokens(config, needed)
    moefold_step = partial(take_next_step, run)
    timing = time_training_steps(moefold_step, attrgetter("loss"), config, steps)
    if profile is not None:
        run.out = profile
        _, profiled = profile_step(run, moefold_step)
        text = profile_text(run, profiled) + "\n"
        (profile / "profile.txt").write_text(text)
        write_profile_trace(run, profiled)
    run.gradients.remove_hooks()
    return timing


def time_transformers_steps(config: Config, steps: int) -> StepTiming:
    model = transformers_model(config)
    train_on = transformers_update(model, config)
    tokens = random_tokens(config, steps + WARM_UP_STEPS)
    context = tokens[:-1]
    ids = torch.from_numpy(context.astype(np.int64))
    train = config.train
    ids_NBS = ids.view(-1, train.global_batch, config.data.seq_len)
    ids_NBS = ids_NBS.to(train.device)
    batches = iter(ids_NBS)

    def transformers_step() -> Tensor:
        return train_on(next(batches))

    return time_training_steps(transformers_step, Tensor.item, config, steps)


def transformers_update(model: Any, config: Config) -> TrainOn:
    """A training step of transformers' model: forward, backward, clipping, fused AdamW; returns the loss."""
    parameters = list(model.parameters())
    lr = config.optim.lr
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True)

    def train_on(ids_BS: Tensor) -> Tensor:
        loss = model(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return train_on


def transformers_model(config: Config) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    family = family_for_model(config.model)
    options = config_json_for(family, config.model)
    hf_config = AutoConfig.for_model(**options, use_cache=False)
    device = config.train.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            hf_config, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=dtype
        )


def time_training_steps(take_step: TakeStep, loss_of: LossOf, config: Config, steps: int) -> StepTiming:
    """Some steps to warm up, then the time of `steps` in a row. Losses are read at the end: reading one waits."""
    device = config.train.device
    first = last = take_step()
    for _ in range(WARM_UP_STEPS - 1):
        take_step()
    synchronize_device(device)
    reset_peak_memory(device)
    with collect_garbage_manually():
        begun = time.perf_counter()
        # Steps are only launched here; the synchronization below waits for the last.
        for _ in range(steps):
            last = take_step()
        synchronize_device(device)
        elapsed = time.perf_counter() - begun
    seconds = elapsed / steps
    speed = tokens_per_step(config) / seconds
    flops = train_flops_per_token(config.model, config.data.seq_len)
    return StepTiming(
        milliseconds=seconds * 1e3,
        tokens_per_s=speed,
        tflops=speed * flops / 1e12,
        peak_gib=peak_device_gib(device) or 0.0,
        first_loss=loss_of(first),
        last_loss=loss_of(last),
    )


def step_report(options: StepOptions) -> Report:
    """Every model in turn, by moefold and by transformers. Each timing is printed when it is measured, and the report
    so far is written to the folder `options.out`, so that an interrupted run loses nothing."""
    device = resolve_device(options.device)
    names = all_of("model", options.model, STEP_GOALS)
    recipes = all_of("recipe", options.recipe, RECIPE_SPECS)
    out = options.out
    results: list[Row] = []
    keys = changed_keys(options)
    precisions = {recipe: {"recipe": recipe, **keys} for recipe in recipes}
    report = machine_facts(device) | {"precision": keys, "graphs": options.graphs, "results": results}
    for name in names or STEP_GOALS:
        config = with_graphs(step_bench_config(name, device), options.graphs)
        layers = config.model.layers
        row: Row = {"model": name, "layers": layers}
        row["goal"] = vars(STEP_GOALS[name])
        results.append(row)
        folder = out / name if out else None
        contenders = step_contenders(config, options.steps, folder, precisions)
        for contender, measure in contenders.items():
            timing = measure()
            free_device_memory(device)
            row[contender] = timing._asdict()
            tell_progress(f"{name}, {contender}: {timing_text(timing)}")
            if out:
                text = json.dumps(report, indent=1)
                (out / "step.json").write_text(text)
    return report


def timing_text(timing: StepTiming) -> str:
    return f"{timing.milliseconds:.1f} ms, {timing.tokens_per_s:,.0f} tokens/s, peak {timing.peak_gib:.1f} GiB"


def step_contenders(
    config: Config, steps: int, profile: Path | None, precisions: dict[str, PrecisionKeys]
) -> dict[str, StepTimer]:  # fmt: skip
    contenders: dict[str, StepTimer] = {}
    contenders["ours"] = partial(time_moefold_steps, config, steps, profile)
    for recipe, keys in precisions.items():
        folder = profile / recipe if profile else None
        variant = with_precision_keys(config, keys)
        contenders[recipe] = partial(time_moefold_steps, variant, steps, folder)
    if installed_version("transformers"):
        contenders["transformers"] = partial(time_transformers_steps, config, steps)
    return contenders


def print_step_report(report: Report) -> None:
    heading = report_heading(report)
    caption = f"{STEP_CAPTION}\n{recipes_title(report)}" if keys_of_report(report) else STEP_CAPTION
    if report.get("graphs", "none") != "none":
        caption += f"\nours: graphs {report['graphs']}"
    table = report_table(heading, caption=caption)
    table.add_column("model, layers", no_wrap=True)
    add_number_columns(table, "tokens/s", "goal", "TF/s", "peak", "most")
    add_number_columns(table, "HF", "HF peak", "times")
    for row in report["results"]:
        title = f"{row['model']}, {row['layers']}"
        cells = own_cells(row) + transformers_cells(row)
        table.add_row(title, *cells)
        for recipe in recipes_in(row):
            cells = own_cells(row, recipe)
            table.add_row(f"  {recipe}", *cells)
    Console().print(table)


def own_cells(row: Row, contender: str = "ours") -> list[str]:
    ours = row[contender]
    goal = row["goal"]
    return [
        f"{ours['tokens_per_s']:,.0f}",
        f"{goal['tokens_per_s']:,.0f}",
        f"{ours['tflops']:.0f}",
        f"{ours['peak_gib']:.1f}",
        f"{goal['peak_gib']:.1f}",
    ]


def transformers_cells(row: Row) -> list[str]:
    if "transformers" not in row:
        return ["", "", ""]
    ours = row["ours"]
    theirs = row["transformers"]
    ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
    speed = f"{theirs['tokens_per_s']:,.0f}"
    peak = f"{theirs['peak_gib']:.1f}"
    return [speed, peak, f"{ratio:.2f}"]
