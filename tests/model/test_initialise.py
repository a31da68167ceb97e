"""Initial weights depend on the parameter's name and the seed, and on nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.declare import declared_parameters
from moefold.model.initialise import fill_parameter_slice, initialise_parameters, parameter_slices
from moefold.model.transformer import Transformer
from moefold.train.assemble import default_dtype
from tests.support.models import transformer

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=32,
    dense_ffn=24,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8, qk_norm="head", qkv_bias=True, out_bias=True),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, shared_ffn=20, shared_gate=True, latent=12, biases=True, dense_layers=1),
    mtp=1,
)


def make(
    model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32, seed: int = 1, fill_it: bool = True
) -> Transformer:
    with default_dtype(dtype):
        made = transformer(model, 8, BoundKernels(Facts("cpu", "fp32")))
    if fill_it:
        initialise_parameters(made, seed)
    return made


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {p.name: p.tensor.detach() for p in declared_parameters(model)}


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_values():
    one, same, other = values(make()), values(make()), values(make(seed=2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    for p in declared_parameters(make()):
        assert torch.equal(one[p.name], other[p.name]) == (not p.declaration.std), p.name


def test_more_layers_change_nothing_but_the_published_scale_of_outputs():
    few, many = values(make()), values(make(replace(MODEL, layers=8)))
    assert few.keys() < many.keys()
    for name, value in few.items():
        scaled = name.endswith(("attention.out.weight", "down.weight", "experts.down"))
        expected = many[name] * (8 / 2) ** 0.5 if scaled else many[name]
        torch.testing.assert_close(
            value, expected, rtol=1e-6 if scaled else 0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_more_experts_leave_the_first_ones_as_they_were():
    few, many = values(make()), values(make(replace(MODEL, moe=replace(MODEL.moe, experts=6))))
    for name in ("blocks.1.moe.experts.gate_up", "blocks.1.moe.experts.down"):
        assert torch.equal(few[name], many[name][:4])


def test_the_order_of_filling_does_not_matter():
    forwards, backwards = make(), make(fill_it=False)
    torch.manual_seed(99)  # nor does the global generator
    for name, parameter, view in reversed(list(parameter_slices(declared_parameters(backwards)))):
        fill_parameter_slice(name, parameter, view, seed=1)
    one, two = values(forwards), values(backwards)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_initialising_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_precision_holds_the_same_values_rounded(dtype: torch.dtype):
    single, other = values(make()), values(make(dtype=dtype))
    for name, value in other.items():
        assert value.dtype == dtype
        assert torch.equal(value, single[name].to(dtype)), name


def test_every_random_matrix_and_every_expert_is_drawn_by_itself():
    slices = parameter_slices(declared_parameters(make()))
    drawn = {name: view.flatten() for name, p, view in slices if p.declaration.std}
    assert sum("experts" in name for name in drawn) == 2 * 2 * 4, "of a block and of the layer that looks ahead"
    for (one, a), (two, b) in itertools.combinations(drawn.items(), 2):
        a, b = a[: min(len(a), len(b))], b[: min(len(a), len(b))]
        cosine = (a @ b / (a.norm() * b.norm())).item()
        assert abs(cosine) < 6 / len(a) ** 0.5, f"{one} and {two} are alike"


def test_matrices_have_their_standard_deviation_norms_are_one_and_biases_zero():
    made = make(replace(MODEL, hidden=128, vocab=512))
    for p in declared_parameters(made):
        std = p.declaration.std
        if std is None:
            assert (p.tensor == 1).all(), p.name
        elif std == 0:
            assert (p.tensor == 0).all(), p.name
        else:
            assert p.tensor.std().item() == pytest.approx(std, rel=5 / (2 * p.tensor.numel()) ** 0.5), p.name
            assert abs(p.tensor.mean().item()) < 5 * std / p.tensor.numel() ** 0.5, p.name
    assert made.blocks[1].moe.experts.down.std().item() == pytest.approx(0.02 / 2, rel=0.05)  # 2 layers: sqrt(2 x 2)


def test_a_parameter_nobody_declared_is_an_error():
    made = make(fill_it=False)
    made.head.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"head\.extra was not declared"):
        initialise_parameters(made, 1)
