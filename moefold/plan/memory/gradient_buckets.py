"""Gradient memory of a step's only microbatch, as the trainer allocates it: a bucket at a time, when the first gradient
of the bucket comes. Buckets follow backward; weights with the same cuts share them (shard/buckets.py). So the gradient
of the embedding has its memory with that of the first layers' attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from moefold.anatomy.step_specs import StepSpec
from moefold.layout.placement import BUCKET_ELEMENTS, DimCuts

BucketClass = tuple[DimCuts, bool]  # cuts of the weights, and whether they are matrices, which decay


@dataclass
class GradientBucket:
    """`first`: the step of backward in which its first gradient comes."""

    first: int
    elements: float = 0.0


def gradients_before_steps(steps: Iterable[StepSpec], degrees: Mapping[str, int]) -> list[float]:
    """For each step in the order of backward: the parameters whose gradients have memory when it begins."""
    in_order = list(steps)
    begun = [0.0] * len(in_order)
    for bucket in buckets_of_steps(in_order, degrees):
        begun[bucket.first] += bucket.elements
    before = accumulate(begun[:-1], initial=0.0)
    return list(before)


def buckets_of_steps(steps: Iterable[StepSpec], degrees: Mapping[str, int]) -> list[GradientBucket]:
    buckets: list[GradientBucket] = []
    filling: dict[BucketClass, GradientBucket] = {}
    for number, step in enumerate(steps):
        for weight in reversed(step.weights):
            kind = (weight.cut, weight.is_matrix)
            if kind not in filling:
                filling[kind] = GradientBucket(number)
                buckets.append(filling[kind])
            bucket = filling[kind]
            bucket.elements += prod(weight.part(degrees))
            if bucket.elements >= BUCKET_ELEMENTS:
                del filling[kind]
    return buckets
