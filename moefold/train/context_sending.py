"""Measurement of what context-parallel groups send, for the plans of dynamic sizes (data/flops_price.py).

Each rank times forward and backward of one layer's attention. Alone it attends to a sample of as many tokens as it
holds, which gives the seconds of a token and a key. In a group of each size it attends to samples of one token: what
takes time then is what the mechanism sends and launches. All groups of a size send at once, as in a step, and the
slowest rank counts, so that all ranks have the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.config.run import Config
from moefold.data.dynamic_context import context_shape
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES
from moefold.model.attention.context_parallel import ContextMechanism, choose_context_mechanisms
from moefold.model.steps import Region

MOST_TOKENS = {"cpu": 1024, "cuda": 1 << 20}  # of a rank
WARM_UP = 2  # the first message of a group also opens its connections
REPETITIONS = 3


class HeadShapes(NamedTuple):
    """Heads of a tensor-parallel rank, and widths."""

    heads: int
    kv_heads: int
    width: int
    value_width: int


def resolve_sending(config: Config, kernels: BoundKernels, world: World) -> tuple[str, ...]:
    """`parallel.context_sending` of the run: as it is set, or measured now. Every rank calls this."""
    parallel = config.parallel
    if parallel.context_sending or parallel.context_sizes == "fixed":
        return parallel.context_sending
    measured = measure_sending(config, kernels, world)
    texts = [f"{keys:.3g}" for keys in measured]
    return tuple(texts)


def measure_sending(config: Config, kernels: BoundKernels, world: World) -> list[float]:
    """By the size of a group above 1: keys that a token attends to while its own are sent."""
    shape = context_shape(config, world.dp_cp.size)
    mechanisms = choose_context_mechanisms(config.parallel.context, kernels, world)
    device = world.device
    tokens = tokens_of_trial(shape.limit, device)
    shapes = head_shapes(config)
    dtype = DTYPES[config.train.precision]
    inputs = random_heads(shapes, tokens, dtype, device)
    own: list[float] = []
    for size in shape.sizes:
        mechanism = mechanisms[size]
        positions = size * tokens
        begins_BS = one_sample(tokens, device)
        if size > 1:
            begins_BS = samples_of_one_token(positions, device)
        seconds = attention_seconds(mechanism, inputs, begins_BS)
        own.append(seconds)
    slowest = torch.tensor(own, dtype=torch.float64)
    all_reduce_max_no_grad(slowest, world.everyone)
    attending, *sending = slowest.tolist()
    seen = tokens / 2  # of each token, on average
    of_key = attending / seen
    return [seconds / of_key for seconds in sending]


def tokens_of_trial(limit: int, device: torch.device) -> int:
    """An even number, for two chunks."""
    most = MOST_TOKENS[device.type]
    tokens = min(limit, most)
    return tokens + tokens % 2


def head_shapes(config: Config) -> HeadShapes:
    attention = config.model.attention
    tp = config.parallel.tp
    is_latent = attention.kind == "mla"
    kv_heads = attention.heads if is_latent else attention.kv_heads
    value_width = attention.value_dim if is_latent else attention.head_dim
    heads_here = attention.heads // tp
    kv_heads_here = max(1, kv_heads // tp)
    return HeadShapes(heads_here, kv_heads_here, attention.head_dim, value_width)


def random_heads(shapes: HeadShapes, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k and v of one sequence's positions on this rank."""
    generator = torch.Generator(device)
    generator.manual_seed(0)
    heads, kv_heads, width, value_width = shapes
    of_q = (heads, width)
    of_k = (kv_heads, width)
    of_v = (kv_heads, value_width)
    found: list[Tensor] = []
    for each in (of_q, of_k, of_v):
        sizes = (1, tokens, *each)
        x = torch.randn(sizes, device=device, generator=generator)
        x = x.to(dtype)
        x.requires_grad_()
        found.append(x)
    return found


def one_sample(tokens: int, device: torch.device) -> Tensor:
    shape = (1, tokens)
    return torch.zeros(shape, dtype=torch.int64, device=device)


def samples_of_one_token(tokens: int, device: torch.device) -> Tensor:
    begins_S = torch.arange(tokens, device=device)
    return begins_S[None]


def attention_seconds(mechanism: ContextMechanism, inputs: list[Tensor], begins_BS: Tensor) -> float:
    """Median seconds of forward and backward."""
    q, k, v = inputs
    width = q.shape[-1]
    scale = width**-0.5
    device = begins_BS.device
    join = mechanism.heads_joiner(Region("swap"))

    def forward_and_backward() -> None:
        by_head = mechanism.attend(q, k, v, scale, 0, None, begins_BS)
        y = join(by_head)
        dy = torch.ones_like(y)
        torch.autograd.grad(y, inputs, dy)

    return median_seconds(forward_and_backward, device)


def median_seconds(work: Callable[[], None], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(WARM_UP + REPETITIONS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - begun
        times.append(elapsed)
    return median(times[WARM_UP:])
