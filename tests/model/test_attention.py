"""Grouped-query attention: what it may see, how heads share, how positions, windows and sinks enter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from moefold.anatomy.step_specs import sliding_window_of
from moefold.config.run import AttentionConfig, ModelConfig, RopeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.facts import Facts
from moefold.kernels.norm.rope import RopeAngles, rope
from moefold.model.attention.attention_base import Rotary
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.attention.rope_tables import rotary_tables
from moefold.model.initialise import initialise_parameters
from moefold.train.assemble import default_dtype
from tests.support.models import NormedAttention, attend, choices, share

LENGTH, HIDDEN = 10, 24
BASE = AttentionConfig(heads=4, kv_heads=2, head_dim=8)
FACTS = Facts("cpu", "fp64", hidden=HIDDEN)
BINDINGS = {"chosen": BoundKernels(FACTS), "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG])}


def make(attention: AttentionConfig = BASE, kernels: str = "chosen", layer: int = 0) -> GroupedQueryAttention:
    with default_dtype(torch.float64):
        model = ModelConfig(hidden=HIDDEN, attention=attention, init_std=0.3)
        module = GroupedQueryAttention(model, layer, choices(model, LENGTH, BINDINGS[kernels]))
    initialise_parameters(module, seed=1)
    with torch.no_grad():  # norms start at one, biases and sinks at zero; here they shall matter
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1 or "bias" in name:
                parameter.add_(torch.linspace(-0.3, 0.5, parameter.numel()).view_as(parameter))
    return module


def stream(sequences: int = 2, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sequences * length, HIDDEN, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kernels", BINDINGS)
def test_a_later_token_changes_no_earlier_output_and_no_other_sequence(kernels: str):
    module, x_TD = make(kernels=kernels), stream()
    before = attend(module, x_TD, share(2, LENGTH)).unflatten(0, (2, LENGTH))
    for place in (1, 4, LENGTH - 1):
        changed = x_TD.clone()
        changed[place] += 1.0  # a token of the first sequence
        after = attend(module, changed, share(2, LENGTH)).unflatten(0, (2, LENGTH))
        torch.testing.assert_close(after[0, :place], before[0, :place], rtol=0, atol=1e-13)
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-13)
        assert not torch.allclose(after[0, place:], before[0, place:], atol=1e-6)


def test_grouped_heads_equal_full_heads_whose_keys_and_values_are_repeated():
    grouped, full = make(), make(replace(BASE, kv_heads=4))
    with torch.no_grad():
        full.load_state_dict(
            {
                name: value.repeat_interleave(2, dim=0) if name in ("key.weight", "value.weight") else value
                for name, value in grouped.state_dict().items()
            }
        )
    torch.testing.assert_close(
        attend(grouped, stream(), share(2, LENGTH)), attend(full, stream(), share(2, LENGTH)), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("kind", "query", "key"), [("head", (8,), (8,)), ("full", (32,), (16,))])
def test_qk_norm_has_the_width_of_a_head_or_of_all_heads(kind, query, key):
    module = make(replace(BASE, qk_norm=kind))
    assert module.query_norm.weight.shape == query
    assert module.key_norm.weight.shape == key
    assert not hasattr(make(), "query_norm")


def by_formula(
    module: GroupedQueryAttention, a: AttentionConfig, x_TD: torch.Tensor, sequences: int, window: int = 0
) -> torch.Tensor:
    """The whole layer, one query head and one position at a time."""
    p = dict(module.named_parameters())

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def project(name: str, heads: int) -> torch.Tensor:
        y = torch.einsum("td,hkd->thk", norm(x_TD, p["norm.weight"]), p[f"{name}.weight"])
        y = y + p[f"{name}.bias"] if a.qkv_bias else y
        if name != "value" and a.qk_norm == "head":
            y = norm(y, p[f"{name}_norm.weight"])
        if name != "value" and a.qk_norm == "full":
            y = norm(y.flatten(1), p[f"{name}_norm.weight"]).view_as(y)
        return y.view(sequences, -1, heads, a.head_dim)

    def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
        """The first dims turn, in pairs half of them apart; the rest stays."""
        turning = a.rope_dim or a.head_dim
        half = turning // 2
        pairs = torch.complex(vector[:half], vector[half:turning])
        angle = position * a.rope.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        turned = pairs * torch.polar(torch.ones(half, dtype=torch.float64), angle)
        return torch.cat((turned.real, turned.imag, vector[turning:]))

    q, k, v = project("query", a.heads), project("key", a.kv_heads), project("value", a.kv_heads)
    rows = []
    for b in range(sequences):
        for s in range(q.shape[1]):
            heads = []
            first = max(0, s + 1 - window) if window else 0
            for h in range(a.heads):
                g = h // (a.heads // a.kv_heads)
                keys = torch.stack([turn(k[b, t, g], t) for t in range(first, s + 1)])
                powers = (keys @ turn(q[b, s, h], s) / math.sqrt(a.head_dim)).exp()
                nothing = p["sinks"][h].exp() if a.sinks else 0.0
                heads.append(powers @ v[b, first : s + 1, g] / (powers.sum() + nothing))
            rows.append(torch.cat(heads))
    y = torch.stack(rows) @ p["out.weight"].T
    return y + p["out.bias"] if a.out_bias else y


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_the_layer_equals_its_formula_written_out(qk_norm, bias, kernels):
    a = replace(BASE, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias)
    module = make(a, kernels)
    torch.testing.assert_close(
        attend(module, stream(), share(2, LENGTH)), by_formula(module, a, stream(), 2), rtol=1e-12, atol=1e-12
    )


VARIANTS = {
    "some dims turn": {"rope_dim": 4},
    "two dims turn": {"rope_dim": 2, "qk_norm": "head"},
    "a window": {"window": 3},
    "a window of one": {"window": 1},
    "a window longer than the sequence": {"window": 20},
    "sinks": {"sinks": True},
    "a window and sinks": {"window": 3, "sinks": True, "qkv_bias": True, "out_bias": True},
    "one key head": {"kv_heads": 1, "sinks": True, "window": 4},
    "everything": {"rope_dim": 4, "window": 4, "sinks": True, "qkv_bias": True, "out_bias": True, "qk_norm": "full"},
}


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_with_partial_rotary_windows_or_sinks_equals_its_formula_written_out(variant, kernels):
    a = replace(BASE, **VARIANTS[variant])
    module = make(a, kernels)
    expected = by_formula(module, a, stream(), 2, a.window)
    torch.testing.assert_close(attend(module, stream(), share(2, LENGTH)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradients_of_a_layer_are_those_of_finite_differences(variant, kernels):
    module = make(replace(BASE, **VARIANTS[variant]), kernels)
    normed = NormedAttention(module)
    names, values = zip(*normed.named_parameters(), strict=True)

    def run(x_TD: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return functional_call(normed, dict(zip(names, parameters, strict=True)), (x_TD, share(2, LENGTH)))

    assert torch.autograd.gradcheck(run, (stream().requires_grad_(), *values), fast_mode=True)


@pytest.mark.parametrize("kernels", BINDINGS)
@pytest.mark.parametrize("window", [1, 3, 7])
def test_a_token_reaches_as_many_tokens_as_the_window_is_long(window: int, kernels: str):
    module = make(replace(BASE, window=window), kernels)
    before, changed = stream(1), stream(1)
    changed[2] += 1.0
    moved = (attend(module, changed, share(1, LENGTH)) - attend(module, before, share(1, LENGTH))).abs().amax(1) > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(2, min(2 + window, LENGTH)))


def test_every_so_many_layers_one_sees_all_and_the_others_their_window():
    a = replace(BASE, window=3, full_every=2)
    assert [make(a, layer=layer).window for layer in range(6)] == [3, 0, 3, 0, 3, 0]
    assert [make(replace(a, full_every=3), layer=layer).window for layer in range(6)] == [3, 3, 0, 3, 3, 0]
    assert [make(replace(a, full_every=1), layer=layer).window for layer in range(3)] == [3, 3, 3]
    assert [sliding_window_of(ModelConfig(attention=a), layer) for layer in range(4)] == [3, 0, 3, 0]
    module = make(a, layer=1)
    torch.testing.assert_close(
        attend(module, stream(), share(2, LENGTH)), by_formula(module, a, stream(), 2), rtol=1e-12, atol=1e-12
    )


def test_sinks_are_one_number_a_head_and_start_at_zero():
    module = GroupedQueryAttention(
        ModelConfig(hidden=HIDDEN, attention=replace(BASE, sinks=True)),
        0,
        choices(ModelConfig(hidden=HIDDEN), LENGTH, BINDINGS["chosen"]),
    )
    initialise_parameters(module, seed=1)
    assert module.sinks is not None
    assert module.sinks.tolist() == [0.0] * 4
    assert make().sinks is None


def test_scores_depend_on_the_distance_only():
    cos, sin = rotary_tables(40, 16, RopeConfig())
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(2))

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rope(x.expand(1, 40, 1, 16), RopeAngles(cos, sin))[0, :, 0]

    scores = turned(q) @ turned(k).T
    for distance in range(-39, 40):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-12)
    assert scores[:, 0].std() > 0.1, "and they do depend on it"


def test_turning_keeps_the_length_and_position_zero_does_not_turn():
    cos, sin = rotary_tables(20, 16, RopeConfig())
    x = torch.randn(2, 20, 3, 16, generator=torch.Generator().manual_seed(1))
    y = rope(x, RopeAngles(cos, sin))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, 0], x[:, 0])


def test_turning_keeps_the_precision_of_what_it_turns():
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(rope(x, RopeAngles(torch.ones(5, 4), torch.zeros(5, 4))), x, rtol=1e-14, atol=0)


def test_shorter_sequences_than_the_tables_are_the_beginning_of_longer_ones():
    module, x_TD = make(), stream(1)
    torch.testing.assert_close(
        attend(module, x_TD, share(1, LENGTH))[:4], attend(module, x_TD[:4], share(1, 4)), rtol=0, atol=1e-13
    )


def test_all_layers_rotate_by_the_same_tables_also_after_inference():
    """One table for a model, not one for each layer."""
    kernels = BoundKernels(Facts("cpu", "fp32"))
    first, second = (Rotary(8, RopeConfig(theta=123.0), 16, kernels) for _ in range(2))
    tokens = share(1, 16)
    with torch.inference_mode():
        made = first.angles(tokens)
    again = second.angles(tokens)
    assert made.cos_Sd.data_ptr() == again.cos_Sd.data_ptr()
    x = torch.randn(1, 16, 2, 8, requires_grad=True)
    second.first(x, tokens).sum().backward()
    assert x.grad is not None
