"""Products of few rows in Triton, in its interpreter where there is no GPU, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.few_rows_triton import launch_few_rows
from moefold.kernels.linear.linear import linear
from moefold.kernels.linear.product import PLAIN
from moefold.layout.axes import single_rank_world
from moefold.precision.linear import Linear, LinearGroup

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 300, [20]), (5, 48, [16, 8, 40]), (33, 16, [33, 16, 7, 9])], ids=str
)
def test_every_layer_has_its_product_and_its_bias(rows: int, inputs: int, outputs: list[int]):
    x = normal(rows, inputs)
    layers = []
    for seed, width in enumerate(outputs, 1):
        bias = normal(width, seed=30) if seed % 2 else None
        layers.append((normal(width, inputs, seed=seed), bias))
    found = launch_few_rows(x, layers)
    for y, (weight, bias) in zip(found, layers, strict=True):
        torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_group", [False, True])
def test_layers_without_an_adapter_are_asked_for_few_rows(in_group: bool, monkeypatch: pytest.MonkeyPatch):
    """Whether rows are few is what a device and the rows decide, not that a module names the adapters of its layers."""
    asked: list[torch.Tensor] = []
    monkeypatch.setattr("moefold.kernels.linear.linear.has_few_rows", asked.append)
    world = single_rank_world("cpu")
    layer = Linear(world, 16, 8, std=1.0)
    kernels = BoundKernels(Facts("cpu", "fp32"), ["linear=fused_dgrad"])
    layer.use_recipe(PLAIN, kernels)
    module = LinearGroup(world, layer, layer) if in_group else layer
    with torch.no_grad():
        module(normal(2, 16).cpu())
    assert len(asked) == 1
    module(normal(2, 16).cpu())
    assert len(asked) == 1, "gradients will be asked for"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_few_rows_take_this_way_and_give_the_same():
    x = normal(32, 1, 256).bfloat16()
    layers = [(normal(512, 256, seed=seed).bfloat16(), None) for seed in (1, 2, 3)]
    run = linear.implementations["fused_dgrad"]
    with torch.no_grad():
        found = run(x, layers)
    for y, (weight, _) in zip(found, layers, strict=True):
        (direct,) = launch_few_rows(x[:, 0], [(weight, None)])
        assert torch.equal(y[:, 0], direct)
        torch.testing.assert_close(y, F.linear(x, weight), rtol=2e-2, atol=0.3)
