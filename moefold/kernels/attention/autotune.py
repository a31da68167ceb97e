"""Times the ways of attending on this card, for `attention_times.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.timings import TIMED_TOKENS, AttentionShape, AttentionTimes, known_times
from moefold.kernels.catalog import ATTENTION_CHOICES, Facts
from moefold.kernels.registry import DTYPES


def candidate_names(facts: Facts) -> list[str]:
    """Those that can be compared here."""
    return [choice.name for choice in ATTENTION_CHOICES if choice.name != "sdpa" and choice.when(facts)]


def known_or_measured_times(facts: Facts) -> AttentionTimes:
    """What is known of this shape on this card, or else measured now. Where nothing depends on it nothing is."""
    if facts.attention is None or facts.repeatable or len(candidate_names(facts)) < 2:
        return {}
    return known_times(facts.capability, facts.attention) or measure_candidates(facts)


def measure_candidates(facts: Facts) -> AttentionTimes:
    """Milliseconds of forward and backward, for each way."""
    assert facts.attention is not None
    inputs = random_inputs(facts.attention, DTYPES[facts.dtype])
    return {name: median_milliseconds(forward_and_backward(name, *inputs)) for name in candidate_names(facts)}


def random_inputs(shape: AttentionShape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator("cuda").manual_seed(0)
    batch = max(1, TIMED_TOKENS // shape.length)
    heads = [(shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)]
    sizes = [*heads, (shape.heads, shape.value_dim)]
    made = [torch.randn(batch, shape.length, *size, device="cuda", generator=generator).to(dtype) for size in sizes]
    return (*(x.requires_grad_() for x in made[:3]), made[3])


def forward_and_backward(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, ...]]:
    attend = attention.implementations[name]
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dy)


def median_milliseconds(work: Callable[[], object], repeat: int = 5) -> float:
    """Milliseconds, the median of a few after two to warm up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 3)]
    for event in events:
        event.record()
        work()
    events[-1].synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events[2:]))
