"""Times the ways of attending on this card, for `attention_times.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from moefold.kernels.attention import attention
from moefold.kernels.attention_times import TOKENS, Shape, Times, known
from moefold.kernels.catalog import ATTENTION, Facts
from moefold.kernels.registry import DTYPES


def ways(facts: Facts) -> list[str]:
    """Those that can be compared here."""
    return [choice.name for choice in ATTENTION if choice.name != "sdpa" and choice.when(facts)]


def times_for(facts: Facts) -> Times:
    """What is known of this shape on this card, or else measured now. Where nothing depends on it nothing is."""
    if facts.attention is None or facts.repeatable or len(ways(facts)) < 2:
        return {}
    return known(facts.capability, facts.attention) or measure(facts)


def measure(facts: Facts) -> Times:
    """Milliseconds of forward and backward, for each way."""
    assert facts.attention is not None
    inputs = random_inputs(facts.attention, DTYPES[facts.dtype])
    return {name: timed(both_ways(name, *inputs)) for name in ways(facts)}


def random_inputs(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator("cuda").manual_seed(0)
    batch = max(1, TOKENS // shape.length)
    heads = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)]
    sizes = [*heads, (shape.heads, shape.value_dim)]
    made = [torch.randn(batch, shape.length, *size, device="cuda", generator=generator).to(dtype) for size in sizes]
    return (*(x.requires_grad_() for x in made[:3]), made[3])


def both_ways(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    attend = attention.implementations[name]
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dy)


def timed(work: Callable[[], object], repeat: int = 5) -> float:
    """Milliseconds, the median of a few after two to warm up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 3)]
    for event in events:
        event.record()
        work()
    events[-1].synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events[2:]))
