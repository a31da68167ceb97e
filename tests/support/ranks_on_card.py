"""What ranks that share one GPU do, for tests/train/test_fp8_communication_on_gpu.py. A module of its own: ranks are
forked once it is imported, and a process that has asked for CUDA devices cannot fork ranks that use them."""

from __future__ import annotations

import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.comm.collectives import reduce_scatter
from moefold.config.run import ParallelConfig
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.layout.axes import World, create_world
from moefold.precision.fp8_scatter_sum import ScatterFormat, scatter_sums_fp8
from tests.precision.test_fp8_scatter_sum import TOKENS, WIDTH, numbers
from tests.train.test_fp8_communication import train

Weights = dict[str, torch.Tensor]


def on_card(world: World, **parallel: int) -> World:
    return create_world(world.rank, world.size, torch.device("cuda", 0), ParallelConfig(**parallel))


def train_on_card(world: World, cases: list[list[str]]) -> list[tuple[list[float], Weights]]:
    here = on_card(world)
    found: list[tuple[list[float], Weights]] = []
    for words in cases:
        losses, parts = train(here, [*words, "--train.device", "cuda"])
        found.append((losses, {name: part.cpu() for name, part in parts.items()}))
    return found


def scatter_on_card(world: World) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Sums and gradient of the summands in FP8, and the bytes sent: of bf16 and of FP8, forward and backward."""
    tp = on_card(world, tp=world.size).axis("tp")
    dy = numbers(TOKENS, WIDTH, seed=100 + tp.index).bfloat16().cuda()
    sent: list[int] = []
    for format in (None, ScatterFormat(True, True, ScaleRule())):
        summand = numbers(tp.size * TOKENS, WIDTH, seed=tp.index).bfloat16().cuda().requires_grad_()
        with counted_bytes_sent() as counter:
            y = reduce_scatter(summand, tp) if format is None else scatter_sums_fp8(summand, tp, format)
            sent.append(counter.total())
            y.backward(dy)
            sent.append(counter.total() - sent[-1])
    assert summand.grad is not None  # pyright: ignore[reportPossiblyUnbound]
    return y.detach().cpu(), summand.grad.cpu(), sent  # pyright: ignore[reportPossiblyUnbound]
