"""Runs of two ranks that share one GPU, with each kind of `parallel.tiles`: losses are near those of the run without,
whose products and exchanges are apart."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from moefold.layout.axes import World
from tests.support.ranks import run_device_ranks
from tests.train.test_fp8_communication import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"
NEAR = 5e-3  # relative; bf16 rounds what travels in another place
PATIENCE = "--train.slow_timeout=120"  # of a rank whose peer compiles kernels
LAYOUTS = {
    "experts": ["--parallel.ep=2", "--parallel.dispatcher=symmetric"],
    "projections": ["--parallel.tp=2", "--model.moe.shared_ffn=64"],
    "heads": ["--parallel.cp=2", "--parallel.context=all_to_all"],
    "heads,experts": [
        "--parallel.cp=2",
        "--parallel.context=all_to_all",
        "--parallel.ep=2",
        "--parallel.dispatcher=symmetric",
    ],
}


def losses_on_card(world: World, tiles: str) -> list[list[float]]:
    """With the tiles, and without."""
    torch.cuda.set_device(world.device)
    words = [*LAYOUTS[tiles], PATIENCE, "--train.device=cuda", "--train.precision=bf16"]
    return [train(world, [*words, f"--parallel.tiles={each}"])[0] for each in (tiles, "")]


@cache
def on_two(tiles: str) -> list[list[list[float]]]:
    return run_device_ranks(losses_on_card, 2, tiles, device=DEVICE)


@pytest.mark.parametrize("tiles", LAYOUTS)
def test_losses_are_near_those_of_the_run_without(tiles: str):
    for inside, apart in on_two(tiles):
        assert inside == pytest.approx(apart, rel=NEAR)
