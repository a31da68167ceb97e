"""Latent attention against the published definition, one token, head and key at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from moefold.config.run import AttentionConfig, ModelConfig, RopeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG, Facts
from moefold.model.attention.mla import LatentAttention
from moefold.model.initialise import initialise_parameters
from moefold.train.assemble import default_dtype
from tests.model.test_positions import mscale, plain, yarn
from tests.support.models import NormedAttention, attend, choices, share

LENGTH, HIDDEN, EPS = 9, 20, 1e-6
BASE = AttentionConfig(
    kind="mla", heads=3, kv_heads=3, head_dim=10, rope_dim=4, value_dim=6, q_rank=0, kv_rank=7, rope=RopeConfig()
)
FACTS = Facts("cpu", "fp64", hidden=HIDDEN)
BINDINGS = {"chosen": BoundKernels(FACTS), "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG])}
YARN = RopeConfig(scaling="yarn", factor=40.0, original_length=16, beta_fast=2.0, beta_slow=0.5, mscale=0.5)
VARIANTS = {
    "queries from the stream": {},
    "queries from a latent": {"q_rank": 5},
    "values as wide as keys": {"q_rank": 5, "value_dim": 0},
    "values wider than keys": {"value_dim": 14},
    "biases": {"qkv_bias": True, "out_bias": True},
    "biases on a query latent": {"q_rank": 5, "qkv_bias": True, "out_bias": True},
    "few dims stand still": {"rope_dim": 8, "q_rank": 5},
    "a window": {"window": 3},
    "sinks": {"sinks": True, "q_rank": 5},
    "a window and sinks": {"window": 4, "sinks": True, "q_rank": 5},
    "yarn, turned dims sharpened": {"rope": YARN, "q_rank": 5},
    "yarn, whole scores sharpened": {"rope": replace(YARN, mscale=0.8, mscale_all=0.8), "q_rank": 5},
    "yarn, both": {"rope": replace(YARN, mscale=1.5, mscale_all=0.7), "window": 5, "sinks": True, "qkv_bias": True},
}


def make(attention: AttentionConfig, kernels: str = "chosen", layer: int = 0) -> LatentAttention:
    with default_dtype(torch.float64):
        model = ModelConfig(hidden=HIDDEN, norm_eps=EPS, attention=attention, init_std=0.4)
        module = LatentAttention(model, layer, choices(model, LENGTH, BINDINGS[kernels]))
    initialise_parameters(module, seed=1)
    with torch.no_grad():  # norms start at one, biases and sinks at zero; here they shall matter
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.5, parameter.numel()))
    return module


def stream(sequences: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sequences * LENGTH, HIDDEN, generator=generator, dtype=torch.float64)


Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def normed(x: Vector, weight: Vector) -> Vector:
    root = math.sqrt(dot(x, x) / len(x) + EPS)
    return [a / root * w for a, w in zip(x, weight, strict=True)]


def turned(x: Vector, position: int, rope: RopeConfig) -> Vector:
    """A vector of turning dims at its position, pairs half of them apart, sharpened as DeepSeek does."""
    half, factor = len(x) // 2, 1.0
    frequency = [plain(i, len(x), rope.theta) for i in range(half)]
    if rope.scaling == "yarn":
        frequency = yarn(len(x), rope)
        factor = mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all)
    pairs = [complex(x[i], x[i + half]) * factor for i in range(half)]
    angles = [position * f for f in frequency]
    pairs = [z * complex(math.cos(t), math.sin(t)) for z, t in zip(pairs, angles, strict=True)]
    return [z.real for z in pairs] + [z.imag for z in pairs]


def by_formula(module: LatentAttention, a: AttentionConfig, x_TD: torch.Tensor, sequences: int) -> torch.Tensor:
    """DeepSeek-V2's equations 9 to 19 and 37 to 47, in plain Python."""
    p = {name: value.tolist() for name, value in module.named_parameters()}

    def linear(name: str, x: Vector) -> Vector:
        bias = p.get(f"{name}.bias") or [0.0] * len(p[f"{name}.weight"])
        return [dot(row, x) + b for row, b in zip(p[f"{name}.weight"], bias, strict=True)]

    def up(name: str, head: int, x: Vector) -> Vector:
        return [dot(row, x) for row in p[f"{name}.weight"][head]]

    still = a.head_dim - a.rope_dim
    scale = 1 / math.sqrt(a.head_dim)
    if a.rope.scaling == "yarn":
        scale *= mscale(a.rope.factor, a.rope.mscale_all) ** 2
    rows = []
    for x_SD in x_TD.unflatten(0, (sequences, -1)).tolist():
        hs = [normed(x, p["norm.weight"]) for x in x_SD]
        sources = [normed(linear("query_down", h), p["query_norm.weight"]) if a.q_rank else h for h in hs]
        latents = [normed(linear("latent", h), p["latent_norm.weight"]) for h in hs]
        shared_keys = [turned(linear("turning", h), s, a.rope) for s, h in enumerate(hs)]  # one for all heads
        for s in range(len(hs)):
            first = max(0, s + 1 - a.window) if a.window else 0
            joined: Vector = []
            for head in range(a.heads):
                q = up("query", head, sources[s])
                q = q[:still] + turned(q[still:], s, a.rope)
                seen = range(first, s + 1)
                keys = [up("key", head, latents[t]) + shared_keys[t] for t in seen]
                values = [up("value", head, latents[t]) for t in seen]
                powers = [math.exp(dot(q, k) * scale) for k in keys]
                total = math.fsum(powers) + (math.exp(p["sinks"][head]) if a.sinks else 0.0)
                joined += [dot(powers, [v[d] for v in values]) / total for d in range(len(values[0]))]
            rows.append(linear("out", joined))
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layer_equals_its_formula_written_out(variant: str, kernels: str):
    a = replace(BASE, **VARIANTS[variant])
    module = make(a, kernels)
    with torch.no_grad():
        found = attend(module, stream(), share(2, LENGTH))
    torch.testing.assert_close(found, by_formula(module, a, stream(), 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradients_of_the_layer_are_those_of_finite_differences(variant: str, kernels: str):
    module = make(replace(BASE, **VARIANTS[variant]), kernels)
    normed = NormedAttention(module)
    names, values = zip(*normed.named_parameters(), strict=True)

    def run(x_TD: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(normed, dict(zip(names, parameters, strict=True)), (x_TD, share(2, LENGTH)))

    assert torch.autograd.gradcheck(run, (stream().requires_grad_(), *values), fast_mode=True)


def test_without_a_query_latent_there_is_no_norm_and_no_matrix_for_one():
    names = {name for name, _ in make(BASE).named_parameters()}
    assert not any(name.startswith(("query_down", "query_norm")) for name in names)
    latent = {name for name, _ in make(replace(BASE, q_rank=5)).named_parameters()}
    assert latent - names == {"query_down.weight", "query_norm.weight"}


def test_biases_stand_on_the_narrow_projections_and_the_output_only():
    module = make(replace(BASE, q_rank=5, qkv_bias=True, out_bias=True))
    biases = {name for name, _ in module.named_parameters() if name.endswith("bias")}
    assert biases == {"query_down.bias", "latent.bias", "turning.bias", "out.bias"}


def test_all_heads_have_the_same_turning_key():
    """What one head turns by, all do: swapping the heads of every other matrix swaps their results and nothing more."""
    module = make(replace(BASE, q_rank=5))
    before = attend(module, stream(), share(2, LENGTH))
    with torch.no_grad():
        for name in ("query", "key", "value"):
            weight = getattr(module, name).weight
            weight.copy_(weight.flip(0))
        out = module.out.weight.unflatten(1, (BASE.heads, -1))
        out.copy_(out.flip(1).clone())
    torch.testing.assert_close(attend(module, stream(), share(2, LENGTH)), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", BINDINGS)
def test_a_later_token_changes_no_earlier_output_and_no_other_sequence(kernels: str):
    module = make(replace(BASE, q_rank=5), kernels)
    before, changed = stream(), stream()
    changed[4] += 1.0
    moved = (attend(module, changed, share(2, LENGTH)) - attend(module, before, share(2, LENGTH))).abs().amax(1) > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(4, LENGTH))


def test_scores_depend_on_the_distance_only():
    """The same two tokens, further on by the same number of places, see each other as before."""
    module = make(replace(BASE, window=2))
    x, y, other = stream().unbind(0)[:3]
    rows = torch.stack([other, x, y, other, other, other, x, y, other])
    found = attend(module, rows, share(1, LENGTH))
    torch.testing.assert_close(found[2], found[7], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found[1], found[2])
