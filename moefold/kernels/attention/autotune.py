"""Timing of the attention implementations on this GPU, for `timings.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.choices import ATTENTION_CHOICES
from moefold.kernels.attention.timings import TIMED_TOKENS, AttentionTimes, known_times
from moefold.kernels.facts import AttentionShape, Facts
from moefold.layout.dtypes import DTYPES

Work = Callable[[], object]
WARM_UP_RUNS = 2


def candidate_names(facts: Facts) -> list[str]:
    """The implementations that may run here and whose times decide."""
    names: list[str] = []
    for choice in ATTENTION_CHOICES:
        name = choice.name
        if name != "sdpa" and choice.when(facts):
            names.append(name)
    return names


def known_or_measured_times(facts: Facts) -> AttentionTimes:
    """The known times of this shape, or times measured now. Empty where no choice depends on them."""
    if facts.attention is None or facts.repeatable:
        return {}
    candidates = candidate_names(facts)
    if len(candidates) < 2:
        return {}
    known = known_times(facts.capability, facts.attention)
    return known or measure_kernels(facts, candidates)


def measure_kernels(facts: Facts, names: Sequence[str]) -> AttentionTimes:
    """Milliseconds of forward and backward, by implementation."""
    assert facts.attention is not None
    dtype = DTYPES[facts.dtype]
    inputs = random_inputs(facts.attention, dtype)
    times: AttentionTimes = {}
    for name in names:
        work = forward_and_backward(name, *inputs)
        times[name] = median_milliseconds(work)
    return times


def random_inputs(shape: AttentionShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator("cuda")
    generator.manual_seed(0)
    length = shape.length
    batch = max(1, TIMED_TOKENS // length)

    def random_heads(heads: int, width: int) -> Tensor:
        sizes = (batch, length, heads, width)
        x = torch.randn(sizes, device="cuda", generator=generator)
        return x.to(dtype)

    q = random_heads(shape.heads, shape.head_dim)
    k = random_heads(shape.kv_heads, shape.head_dim)
    v = random_heads(shape.kv_heads, shape.value_dim)
    for x in (q, k, v):
        x.requires_grad_()
    dy = random_heads(shape.heads, shape.value_dim)
    return q, k, v, dy


def forward_and_backward(name: str, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Work:
    attend = attention.implementations[name]
    inputs = (q, k, v)

    def forward_then_backward() -> tuple[Tensor, ...]:
        y = attend(*inputs)
        return torch.autograd.grad(y, inputs, dy)

    return forward_then_backward


def median_milliseconds(work: Work, repeat: int = 5) -> float:
    """The median of `repeat` runs after a warm-up."""
    runs = WARM_UP_RUNS + repeat + 1
    events: list[torch.cuda.Event] = []
    for _ in range(runs):
        event = torch.cuda.Event(enable_timing=True)
        events.append(event)
    for event in events:
        event.record()
        work()
    events[-1].synchronize()
    times: list[float] = []
    timed = events[WARM_UP_RUNS:]
    for begin, end in pairwise(timed):
        time = begin.elapsed_time(end)
        times.append(time)
    return median(times)
