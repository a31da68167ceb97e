"""Experts of every MoE family of transformers on a GPU in bf16, of many tokens and of few: outputs and gradients are as
near to fp64 as those of transformers itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.transformers.test_experts import (
    FAMILIES,
    D,
    E,
    K,
    enabled,  # noqa: F401  # registers moefold around every test
    make_experts,
    outputs_and_gradients,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = 700
ROUNDINGS = 2**-7  # of bf16, of the largest value
OWN = ("eager", "grouped_mm")  # transformers' own, which round in different places


def routing_on_gpu(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expert 3 has no token."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    scores = torch.rand(tokens, E, generator=generator)
    scores[:, 3] = -1
    weights = torch.rand(tokens, K, generator=generator, dtype=torch.float64)
    return hidden.bfloat16().cuda(), scores.topk(K).indices.cuda(), weights.bfloat16().cuda()


def error_of(found: list[Any], exact: list[Any]) -> list[float]:
    """Of the largest exact value; the greatest for each output and gradient."""
    errors: list[float] = []
    for one, right in zip(found, exact, strict=True):
        right = torch.zeros_like(one, dtype=torch.float64) if right is None else right.double()
        largest = right.abs().max().clamp(min=1e-6)
        error = (one.double() - right).abs().max() / largest
        errors.append(error.item())
    return errors


def farthest(errors: Iterable[list[float]]) -> list[float]:
    return [max(of_one) for of_one in zip(*errors, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_of_every_family_are_as_near_as_transformers_own(name: str):
    rounded = make_experts(name).to("cuda", torch.bfloat16)
    wide = make_experts(name).cuda()
    wide.load_state_dict(rounded.state_dict())
    inputs = routing_on_gpu(TOKENS)
    hidden, ids, weights = inputs
    exact = outputs_and_gradients(wide, "eager", (hidden.double(), ids, weights.double()))
    theirs = farthest(error_of(outputs_and_gradients(rounded, own, inputs), exact) for own in OWN)
    ours = error_of(outputs_and_gradients(rounded, "moefold", inputs), exact)
    again = error_of(outputs_and_gradients(rounded, "moefold", inputs), exact)
    assert ours == again, "two runs give the same bits"
    for mine, most in zip(ours, theirs, strict=True):
        assert mine <= 2 * most + ROUNDINGS


@pytest.mark.parametrize("name", FAMILIES)
def test_few_tokens_without_gradients_are_as_near_too(name: str):
    rounded: Any = make_experts(name).to("cuda", torch.bfloat16)
    hidden, ids, weights = routing_on_gpu(9)
    wide: Any = make_experts(name).cuda()
    wide.load_state_dict(rounded.state_dict())
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        wide.config._experts_implementation = "eager"
        exact = wide(hidden.double(), ids, weights.double())
        for implementation in ("moefold", *OWN):
            rounded.config._experts_implementation = implementation
            outputs[implementation] = rounded(hidden, ids, weights)
    (ours,) = error_of([outputs["moefold"]], [exact])
    (theirs,) = farthest(error_of([outputs[own]], [exact]) for own in OWN)
    assert ours <= 2 * theirs + ROUNDINGS
