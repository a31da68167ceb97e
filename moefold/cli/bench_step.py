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

from moefold.anatomy.counts import train_flops_per_token
from moefold.checkpoint.hf.config import family_for, options_for
from moefold.cli.bench_layer import about, heading, release
from moefold.config.run import Config
from moefold.data.tokens import Corpus
from moefold.layout.axes import alone
from moefold.layout.declare import declared_parameters
from moefold.model.transformer import Transformer
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble
from moefold.train.host import garbage_by_hand
from moefold.train.profile import profile_text, watch_step, write_profile
from moefold.train.step import train_step

WARM_UP = 4
CAPTION = """tokens/s of whole steps: forward, backward, clipping, update. goal: at least.
peak: GiB of device memory. most: at most. HF: transformers' tokens/s. times: ours over it."""


@dataclass(frozen=True)
class Goal:
    """How many layers of a model are run, and what a step of them should reach on an H200."""

    layers: int
    tokens_per_s: float
    peak_gib: float


MODELS = {
    "olmoe-1b-7b": Goal(16, 56_000, 99.9),
    "qwen3-30b-a3b": Goal(12, 62_000, 113.7),
    "mixtral-8x22b": Goal(2, 58_000, 51.4),
}


class Measured(NamedTuple):
    milliseconds: float
    tokens_per_s: float
    tflops: float
    peak_gib: float
    first_loss: float
    last_loss: float


def measured_config(name: str, device: str) -> Config:
    """The preset's own shapes at 4 sequences of 4096; on a CPU its tiny form, to see that it runs."""
    config = PRESETS[name if device == "cuda" else f"{name}-tiny"]()
    if device == "cuda":
        config = replace(config, model=replace(config.model, layers=MODELS[name].layers))
    train = replace(config.train, device=device, global_batch=4, micro_batch=4, steps=1000)
    lean = {"main": "split", "moments": "bf16", "gradients": "bf16"} if device == "cuda" else {}
    return replace(config, train=train, optim=replace(config.optim, lr=1e-4, **lean))


def random_tokens(config: Config, steps: int) -> np.ndarray:
    count = config.train.global_batch * config.data.seq_len * steps + 1
    return np.random.default_rng(0).integers(0, config.model.vocab, size=count, dtype=np.uint32)


def our_run(config: Config, steps: int) -> Run:
    tokens = random_tokens(config, steps)
    return assemble(config, alone(config.train.device), Path("."), Corpus(tokens, tokens), on_the_device)


@torch.no_grad()
def on_the_device(model: Transformer) -> None:
    """Random weights of the declared spread, drawn where they lie: quicker than those of a run, which do not depend on
    the device."""
    torch.manual_seed(0)
    for parameter in declared_parameters(model):
        std = parameter.declaration.std
        parameter.tensor.fill_(1.0 if std is None else 0.0) if not std else parameter.tensor.normal_(0.0, std)


def our_steps(config: Config, steps: int, profile: Path | None) -> Measured:
    run = our_run(config, steps + WARM_UP + 2)
    take = lambda: train_step(run, run.loader.next())  # noqa: E731
    found = clocked(take, lambda report: report.loss, config, steps)
    if profile is not None:
        run.out = profile
        _, watched = watch_step(run, take)
        (profile / "profile.txt").write_text(profile_text(run, watched) + "\n")
        write_profile(run, watched)
    run.gradients.let_go()
    return found


def their_steps(config: Config, steps: int) -> Measured:
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    options = options_for(family_for(config.model), config.model)
    described = AutoConfig.for_model(**options, use_cache=False)
    dtype = torch.bfloat16 if config.train.device == "cuda" else torch.float32
    with torch.device(config.train.device):
        made = AutoModelForCausalLM.from_config(
            described, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=dtype
        )
    optimizer = torch.optim.AdamW(made.parameters(), lr=config.optim.lr, fused=True)
    tokens = random_tokens(config, steps + WARM_UP)
    rows = torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, config.train.global_batch, config.data.seq_len)
    batches = iter(rows.to(config.train.device))

    def take() -> torch.Tensor:
        ids_BS = next(batches)
        loss = made(input_ids=ids_BS, labels=ids_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), config.optim.max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return clocked(take, lambda loss: loss.item(), config, steps)


def clocked(take: Callable[[], Any], loss_of: Callable[[Any], float], config: Config, steps: int) -> Measured:
    """Some steps to warm up, then the time of several in a row; the losses are read when all are done."""
    cuda = config.train.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    first, *_ = [take() for _ in range(WARM_UP)]
    wait()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with garbage_by_hand():
        begun = time.perf_counter()
        *_, last = [take() for _ in range(steps)]
        wait()
        seconds = (time.perf_counter() - begun) / steps
    speed = config.train.global_batch * config.data.seq_len / seconds
    flops = train_flops_per_token(config.model, config.data.seq_len)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return Measured(seconds * 1e3, speed, speed * flops / 1e12, peak, loss_of(first), loss_of(last))


def bench(names: list[str], device: str, steps: int, out: Path | None) -> dict[str, Any]:
    """Every model in turn, ours and transformers'. Each is told when it is measured, and what there is so far is
    written to `out`: a run that is cut short loses nothing."""
    report: dict[str, Any] = {**about(device), "results": []}
    for name in names:
        config = measured_config(name, device)
        row: dict[str, Any] = {"model": name, "layers": config.model.layers, "goal": vars(MODELS[name])}
        report["results"].append(row)
        folder = out / name if out else None
        for who, measure in ways(config, steps, folder).items():
            found = measure()
            let_go(device)
            row[who] = found._asdict()
            said = f"{found.milliseconds:.1f} ms, {found.tokens_per_s:,.0f} tokens/s, peak {found.peak_gib:.1f} GiB"
            print(f"{name}, {who}: {said}", file=sys.stderr, flush=True)
            if out:
                (out / "step.json").write_text(json.dumps(report, indent=1))
    return report


def ways(config: Config, steps: int, profile: Path | None) -> dict[str, Callable[[], Measured]]:
    if profile:
        profile.mkdir(parents=True, exist_ok=True)
    found = {"ours": lambda: our_steps(config, steps, profile)}
    return found | ({"transformers": lambda: their_steps(config, steps)} if release("transformers") else {})


def let_go(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def show(report: dict[str, Any]) -> None:
    table = Table(
        title=heading(report),
        title_justify="left",
        caption=CAPTION,
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
