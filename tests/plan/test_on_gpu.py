"""Predicted peaks against whole training steps on a CUDA device: the trainer's own, several models and settings."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from moefold.cli.bench_step import on_the_device, random_tokens
from moefold.data.tokens import Corpus
from moefold.layout.axes import alone
from moefold.plan.choices import Choices
from moefold.plan.explain import explain_memory
from moefold.plan.memory import GIB, memory_of
from moefold.presets.recipe import resolve
from moefold.train.assemble import assemble
from moefold.train.step import train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LEAN = "--optim.main=split --optim.moments=bf16 --optim.gradients=bf16"
RUNS = {
    "olmoe, lean": f"olmoe-1b-7b --train.micro_batch=4 --train.global_batch=4 {LEAN}",
    "olmoe, two microbatches": "olmoe-1b-7b --model.layers=8 --train.micro_batch=2 --train.global_batch=4",
    "olmoe, long sequences": "olmoe-1b-7b --model.layers=4 --data.seq_len=32768 --train.global_batch=1",
    "qwen3, lean": f"qwen3-30b-a3b --model.layers=12 --train.micro_batch=4 --train.global_batch=4 {LEAN}",
    "qwen3, bf16 moments": "qwen3-30b-a3b --model.layers=6 --train.micro_batch=2 --optim.moments=bf16",
    "mixtral-8x22b, lean": f"mixtral-8x22b --model.layers=2 --train.micro_batch=4 --train.global_batch=4 {LEAN}",
    "mixtral-8x7b": "mixtral-8x7b --model.layers=2 --train.micro_batch=2 --train.global_batch=4",
    "latent attention": "deepseek-v2-lite --model.layers=6 --train.micro_batch=2 --train.global_batch=4",
    "a token further": "glm-4.5-air --model.layers=3 --train.micro_batch=1 --train.global_batch=2 --optim.moments=bf16",
}


def peak_of(words: list[str]) -> float:
    """The most that torch had allocated while a run took its steps, in bytes."""
    config = resolve(words[0], [*words[1:], "--train.device=cuda", "--train.precision=bf16"])
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    tokens = random_tokens(config, 8)
    run = assemble(config, alone("cuda"), Path("."), Corpus(tokens, tokens), on_the_device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        train_step(run, run.loader.next())
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    run.gradients.let_go()
    return peak


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_of_a_run_is_within_five_percent_of_what_was_planned(name: str):
    words = RUNS[name].split()
    major, minor = torch.cuda.get_device_capability()
    config, choices = resolve(words[0], words[1:]), Choices(capability=10 * major + minor)
    (planned,) = memory_of(config, 1, choices)
    found = peak_of(words)
    said = "\n".join([f"{name}: measured {found / GIB:.2f} GiB", *explain_memory(config, 1, choices)])
    print(f"{name}: measured {found / GIB:.2f} GiB, planned {planned.total / GIB:.2f}")
    assert planned.total == pytest.approx(found, rel=0.05), said
