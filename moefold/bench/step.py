"""`moefold bench step`: whole training steps of known models on one device, transformers' beside ours in the same run.

Ours is the ordinary trainer: assembled as `moefold train` does, its steps one after the other, main weights in fp32.
Theirs is set as its users set it: weights and AdamW's moments in bf16, grouped_mm experts, sdpa. Both see the same
random tokens. TFLOP/s count the model's FLOPs, as `moefold explain` does.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from moefold.anatomy.model_totals import train_flops_per_token
from moefold.bench.layer import installed_version, machine_facts, report_heading
from moefold.checkpoint.hf.config_json import config_json_for, family_for_model
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.model.transformer import Transformer
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.host_duties import collect_garbage_manually
from moefold.train.step import train_step
from moefold.train.step_profile import profile_step, profile_text, write_profile_trace

WARM_UP_STEPS = 4
STEP_CAPTION = """tokens/s of whole steps: forward, backward, clipping, update. goal: at least.
peak: GiB of device memory. most: at most. HF: transformers' tokens/s. times: ours over it."""


@dataclass(frozen=True)
class StepGoal:
    """How many layers of a model are run, and what a step of them should reach on an H200."""

    layers: int
    tokens_per_s: float
    peak_gib: float


STEP_GOALS = {
    "olmoe-1b-7b": StepGoal(16, 56_000, 99.9),
    "qwen3-30b-a3b": StepGoal(12, 62_000, 113.7),
    "mixtral-8x22b": StepGoal(2, 58_000, 51.4),
}


class StepTiming(NamedTuple):
    milliseconds: float
    tokens_per_s: float
    tflops: float
    peak_gib: float
    first_loss: float
    last_loss: float


def step_bench_config(name: str, device: str) -> Config:
    """The preset's own shapes at 4 sequences of 4096; on a CPU its tiny form, to see that it runs."""
    config = PRESETS[name if device == "cuda" else f"{name}-tiny"]()
    if device == "cuda":
        config = replace(config, model=replace(config.model, layers=STEP_GOALS[name].layers))
    train = replace(config.train, device=device, global_batch=4, micro_batch=4, steps=1000)
    lean = {"main": "split", "moments": "bf16", "gradients": "bf16"} if device == "cuda" else {}
    return replace(config, train=train, optim=replace(config.optim, lr=1e-4, **lean))


def random_tokens(config: Config, steps: int) -> np.ndarray:
    count = config.train.global_batch * config.data.seq_len * steps + 1
    return np.random.default_rng(0).integers(0, config.model.vocab, size=count, dtype=np.uint32)


def run_on_random_tokens(config: Config, steps: int) -> Run:
    tokens = random_tokens(config, steps)
    return assemble_run(
        config, single_rank_world(config.train.device), Path("."), Corpus(tokens, tokens), initialise_on_device
    )


@torch.no_grad()
def initialise_on_device(model: Transformer) -> None:
    """Random weights of the declared spread, drawn where they lie: quicker than those of a run, which do not depend on
    the device."""
    torch.manual_seed(0)
    for parameter in declared_parameters(model):
        std = parameter.declaration.std
        parameter.tensor.fill_(1.0 if std is None else 0.0) if not std else parameter.tensor.normal_(0.0, std)


def time_moefold_steps(config: Config, steps: int, profile: Path | None) -> StepTiming:
    run = run_on_random_tokens(config, steps + WARM_UP_STEPS + 2)
    take = lambda: train_step(run, run.loader.next_batch())  # noqa: E731
    found = time_training_steps(take, lambda report: report.loss, config, steps)
    if profile is not None:
        run.out = profile
        _, watched = profile_step(run, take)
        (profile / "profile.txt").write_text(profile_text(run, watched) + "\n")
        write_profile_trace(run, watched)
    run.gradients.remove_hooks()
    return found


def time_transformers_steps(config: Config, steps: int) -> StepTiming:
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    options = config_json_for(family_for_model(config.model), config.model)
    described = AutoConfig.for_model(**options, use_cache=False)
    dtype = torch.bfloat16 if config.train.device == "cuda" else torch.float32
    with torch.device(config.train.device):
        made = AutoModelForCausalLM.from_config(
            described, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=dtype
        )
    optimizer = torch.optim.AdamW(made.parameters(), lr=config.optim.lr, fused=True)
    tokens = random_tokens(config, steps + WARM_UP_STEPS)
    rows = torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, config.train.global_batch, config.data.seq_len)
    batches = iter(rows.to(config.train.device))

    def transformers_step() -> torch.Tensor:
        ids_BS = next(batches)
        loss = made(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), config.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return time_training_steps(transformers_step, lambda loss: loss.item(), config, steps)


def time_training_steps(
    take: Callable[[], Any], loss_of: Callable[[Any], float], config: Config, steps: int
) -> StepTiming:
    """Some steps to warm up, then the time of several in a row; the losses are read when all are done."""
    cuda = config.train.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    first, *_ = [take() for _ in range(WARM_UP_STEPS)]
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with collect_garbage_manually():
        begun = time.perf_counter()
        *_, last = [take() for _ in range(steps)]
        wait()
        seconds = (time.perf_counter() - begun) / steps
    speed = config.train.global_batch * config.data.seq_len / seconds
    flops = train_flops_per_token(config.model, config.data.seq_len)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return StepTiming(seconds * 1e3, speed, speed * flops / 1e12, peak, loss_of(first), loss_of(last))


def step_report(names: list[str], device: str, steps: int, out: Path | None) -> dict[str, Any]:
    """Every model in turn, ours and transformers'. Each is told when it is measured, and what there is so far is
    written to `out`: a run that is cut short loses nothing."""
    report: dict[str, Any] = {**machine_facts(device), "results": []}
    for name in names:
        config = step_bench_config(name, device)
        row: dict[str, Any] = {"model": name, "layers": config.model.layers, "goal": vars(STEP_GOALS[name])}
        report["results"].append(row)
        folder = out / name if out else None
        for who, measure in step_contenders(config, steps, folder).items():
            found = measure()
            free_device_memory(device)
            row[who] = found._asdict()
            said = f"{found.milliseconds:.1f} ms, {found.tokens_per_s:,.0f} tokens/s, peak {found.peak_gib:.1f} GiB"
            print(f"{name}, {who}: {said}", file=sys.stderr, flush=True)
            if out:
                (out / "step.json").write_text(json.dumps(report, indent=1))
    return report


def step_contenders(config: Config, steps: int, profile: Path | None) -> dict[str, Callable[[], StepTiming]]:
    if profile:
        profile.mkdir(parents=True, exist_ok=True)
    found = {"ours": lambda: time_moefold_steps(config, steps, profile)}
    return found | (
        {"transformers": lambda: time_transformers_steps(config, steps)} if installed_version("transformers") else {}
    )


def free_device_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def print_step_report(report: dict[str, Any]) -> None:
    table = Table(
        title=report_heading(report),
        title_justify="left",
        caption=STEP_CAPTION,
        caption_justify="left",
    )
    table.add_column("model, layers", no_wrap=True)
    for column in ("tokens/s", "goal", "TF/s", "peak", "most", "HF", "HF peak", "times"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["results"]:
        mine, other, goal = row["ours"], row.get("transformers"), row["goal"]
        beside = ("", "", "")
        if other:
            ratio = f"{mine['tokens_per_s'] / other['tokens_per_s']:.2f}"
            beside = (f"{other['tokens_per_s']:,.0f}", f"{other['peak_gib']:.1f}", ratio)
        own = (f"{mine['tokens_per_s']:,.0f}", f"{goal['tokens_per_s']:,.0f}", f"{mine['tflops']:.0f}")
        peaks = (f"{mine['peak_gib']:.1f}", f"{goal['peak_gib']:.1f}")
        table.add_row(f"{row['model']}, {row['layers']}", *own, *peaks, *beside)
    Console().print(table)
