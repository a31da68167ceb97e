"""Adapters inside the fused kernels of a GPU: gradients of a step are those of the composition of references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefold.kernels.facts import has_triton
from moefold.layout.axes import single_rank_world
from moefold.model.moe.experts import Experts
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import random_corpus
from tests.train.test_lora_runs import gradients_by_name, random_adapters

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and has_triton()
DEVICE = "cuda" if IS_HOPPER else "cpu"
SIZE = "--model.layers=1 --model.moe.balance.bias_rate=0 --data.seq_len=256 --train.global_batch=4"
REFERENCES = "--kernels.force=expert_mlp=reference,linear=reference,dequantise_rows=reference"


def assembled(base: str, *words: str) -> Run:
    keys = [*SIZE.split(), "--train.micro_batch=2", "--lora.rank=8", f"--lora.base={base}", "--train.precision=bf16"]
    config = resolve_recipe("qwen3-30b-a3b-tiny", [*keys, f"--train.device={DEVICE}", *words], 1)
    run = assemble_run(config, single_rank_world(DEVICE), Path("."), corpus=random_corpus(config))
    random_adapters(run)
    return run


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU and Triton")
@pytest.mark.parametrize("recompute", ["", "layer"])
@pytest.mark.parametrize("base", ["plain", "nf4", "nf4_double", "mxfp4", "fp8"])
def test_gradients_inside_fused_kernels_are_those_of_the_references(base: str, recompute: str):
    """One layer: both runs route alike, since what the router reads comes from attention alone."""
    fused = assembled(base, f"--memory.recompute={recompute}")
    assert all(module.fused for module in fused.model.modules() if isinstance(module, Experts))
    found = gradients_by_name(fused)
    expected = gradients_by_name(assembled(base, REFERENCES))
    assert any(".experts." in name for name in found)
    for name, gradient in expected.items():
        off = (found[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert off < 3e-2, f"{name}: off by {float(off):.1e} of its length"
