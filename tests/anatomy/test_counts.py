"""The torch-free counts against the real model: every parameter by name and shape, every matrix product."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moefold.anatomy.counts import active_parameters, parameters, total_parameters, train_flops_per_token
from moefold.anatomy.steps import block_steps, is_moe, pieces
from moefold.config.run import Config, ModelConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import facts_of
from moefold.model.initialise import initialise
from moefold.model.transformer import Transformer
from moefold.presets.recipe import resolve
from moefold.presets.zoo import PRESETS
from tests.support.models import transformer

PLAIN = ["grouped_gemm=reference", "attention=reference", "cross_entropy=reference"]  # plain matmuls, all counted

VARIANTS = {
    "as it is": "",
    "tied head": "--model.tied_head=true",
    "query, key and value biases": "--model.attention.qkv_bias=true",
    "output bias": "--model.attention.out_bias=true",
    "no qk norm": "--model.attention.qk_norm=none",
    "qk norm per head": "--model.attention.qk_norm=head",
    "qk norm over all heads": "--model.attention.qk_norm=full",
    "shared experts": "--model.moe.shared_ffn=96",
    "dense first layers": "--model.moe.dense_layers=2",
    "one expert, dense but the last": "--model.moe.experts=1 --model.moe.top_k=1 --model.moe.dense_layers=3",
    "no experts at all": "--model.moe.dense_layers=4",
    "everything": "--model.tied_head=true --model.attention.qkv_bias=true --model.attention.out_bias=true "
    "--model.attention.qk_norm=full --model.moe.shared_ffn=32 --model.moe.dense_layers=1 --model.dense_ffn=80",
}


def build(config: Config, device: str, force: tuple[str, ...] | list[str] = ()) -> Transformer:
    kernels = bind(facts_of(config, "cpu", "fp32"), force)
    with torch.device(device):
        return transformer(config.model, config.data.seq_len, kernels)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


CONFIGS = {**{name: (name, "") for name in PRESETS}, **{name: ("tiny", words) for name, words in VARIANTS.items()}}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_the_name_and_size_the_anatomy_says(name: str):
    config = resolve(CONFIGS[name][0], CONFIGS[name][1].split())
    found = {name: prod(shape) for name, shape in shapes(build(config, "meta")).items()}
    assert found == {name: prod(shape) for name, shape in parameters(config.model).items()}
    assert sum(found.values()) == total_parameters(config.model)


@pytest.mark.parametrize("name", ["tiny", "olmoe-1b-7b", *VARIANTS])
def test_every_parameter_has_the_shape_the_anatomy_says(name: str):
    config = resolve(CONFIGS[name][0], CONFIGS[name][1].split())
    assert shapes(build(config, "meta")) == parameters(config.model)


@pytest.mark.parametrize("name", PRESETS)
def test_active_parameters_are_all_but_the_experts_a_token_does_not_visit(name: str):
    model = PRESETS[name]().model
    idle = model.moe.experts - model.moe.top_k
    layers = sum(is_moe(model, layer) for layer in range(model.layers))
    assert total_parameters(model) - active_parameters(model) == layers * idle * 3 * model.moe.ffn * model.hidden
    every = replace(model, moe=replace(model.moe, top_k=model.moe.experts))
    assert active_parameters(every) == total_parameters(every)


@pytest.mark.parametrize(
    ("name", "seq_len", "published"),
    [("qwen3-235b-a22b", 4096, 148.0e9), ("qwen3-235b-a22b", 131_072, 734.7e9), ("qwen3-30b-a3b", 4096, 23.006e9)],
)
def test_flops_per_token_are_the_published_ones(name: str, seq_len: int, published: float):
    assert train_flops_per_token(PRESETS[name]().model, seq_len) == pytest.approx(published, rel=1e-3)


def router_flops(model: ModelConfig) -> int:
    """Forward and backward of one token through every layer's router, which the published tables leave out."""
    layers = sum(is_moe(model, layer) for layer in range(model.layers))
    return layers * 3 * 2 * model.moe.experts * model.hidden


SMALL = "--model.layers=3 --model.hidden=64 --data.seq_len=24 --model.moe.ffn=48"


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "but the last" not in name and "at all" not in name])
def test_the_formula_is_what_torch_counts_on_the_real_model(variant: str):
    """The counter sees all of a causal product, of which the formula counts half: the score and value products of a
    sequence of S are those the formula gives to one of 2 S. And the counter sees the router. Nothing else differs."""
    config = resolve("tiny", [*VARIANTS[variant].split(), *SMALL.split()])
    model = build(config, "cpu", PLAIN)
    initialise(model, seed=1)
    b, s = 2, config.data.seq_len
    tokens, labels = torch.randint(256, (2, b, s), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        losses = model(tokens, labels)
        losses.cross_entropy.backward()
    expected = b * s * (train_flops_per_token(config.model, 2 * s) + router_flops(config.model))
    assert counter.get_total_flops() == expected


def test_the_half_of_causal_attention_that_the_formula_leaves_out_is_exactly_its_context_term():
    model = PRESETS["tiny"]().model
    a, s = model.attention, 256
    left_out = train_flops_per_token(model, 2 * s) - train_flops_per_token(model, s)
    assert left_out == 3 * model.layers * 2 * a.heads * a.head_dim * s


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_steps_the_model_binds_are_those_of_the_anatomy(variant: str):
    config = resolve("tiny", VARIANTS[variant].split())
    model = build(config, "meta")
    for layer, block in enumerate(model.blocks):
        assert [step.spec for step in block.steps()] == block_steps(config.model, layer)  # pyright: ignore
    assert [step.spec for step in model.steps()] == [step for _, step in pieces(config.model)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_counts_after_a_step_are_those_of_the_layers_with_experts(variant: str):
    config = resolve("tiny", VARIANTS[variant].split())
    model = build(config, "cpu")
    initialise(model, seed=1)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens)
    layers = sum(is_moe(config.model, layer) for layer in range(config.model.layers))
    counts_LE = model.balance()
    assert counts_LE.shape[0] == layers
    assert (counts_LE.sum(1) == 32 * config.model.moe.top_k).all()
