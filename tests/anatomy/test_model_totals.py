"""The torch-free counts against the real model: every parameter by name and shape, every matrix product."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moefold.anatomy.model_totals import (
    active_parameters,
    mtp_parameters,
    parameter_shapes,
    total_parameters,
    train_flops_per_token,
)
from moefold.anatomy.step_specs import (
    StepSpec,
    attend_step,
    block_step_specs,
    dispatched_width,
    is_moe_layer,
    prefixed_model_steps,
    prefixed_mtp_steps,
)
from moefold.config.run import Config, ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.layout.declare import declared_parameters
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from tests.support.models import transformer

TINY = [name for name in PRESETS if name.endswith("tiny")]
COUNTED = ["attention=reference", "cross_entropy=reference"]  # plain matmuls, all counted
SHORT = "--data.seq_len=64"  # the shapes of no parameter depend on it, and the tables of positions are made at once

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
    "every other layer has experts": "--model.moe.every=2",
    "every other layer but a dense first": "--model.moe.every=2 --model.moe.dense_layers=1",
    "a gate on shared experts": "--model.moe.shared_ffn=96 --model.moe.shared_gate=true",
    "expert biases": "--model.moe.biases=true --model.moe.activation=clamped_swiglu",
    "latent experts": "--model.moe.latent=48 --model.moe.shared_ffn=32",
    "latent experts with biases": "--model.moe.latent=48 --model.moe.biases=true",
    "geglu in every MLP": "--model.moe.activation=geglu --model.moe.shared_ffn=96 --model.moe.dense_layers=1 "
    "--model.dense_activation=geglu_tanh",
    "no gate in any MLP": "--model.moe.activation=relu2 --model.moe.shared_ffn=96 --model.moe.dense_layers=1 "
    "--model.dense_activation=gelu --model.moe.biases=true --model.moe.latent=48",
    "partial rotary": "--model.attention.rope_dim=8",
    "windows and sinks": "--model.attention.window=8 --model.attention.full_every=2 --model.attention.sinks=true",
    "latent attention": "--model.attention.kind=mla --model.attention.kv_heads=4 --model.attention.rope_dim=16 "
    "--model.attention.qk_norm=none",
    "latent attention with all there is": "--model.attention.kind=mla --model.attention.kv_heads=4 "
    "--model.attention.rope_dim=16 --model.attention.qk_norm=none --model.attention.q_rank=40 "
    "--model.attention.value_dim=24 --model.attention.qkv_bias=true --model.attention.out_bias=true "
    "--model.attention.sinks=true --model.attention.window=5",
    "two tokens further": "--model.mtp=2",
    "two tokens further, tied": "--model.mtp=2 --model.tied_head=true --model.moe.every=2",
    "two tokens further, windows": "--model.mtp=2 --model.attention.window=8 --model.attention.full_every=2",
    "everything": "--model.tied_head=true --model.attention.qkv_bias=true --model.attention.out_bias=true "
    "--model.attention.qk_norm=full --model.moe.shared_ffn=32 --model.moe.dense_layers=1 --model.dense_ffn=80",
}


def build(config: Config, device: str, force: tuple[str, ...] | list[str] = ()) -> Transformer:
    kernels = BoundKernels(facts_from_config(config, "cpu", "fp32"), force)
    with torch.device(device):
        return transformer(config.model, config.data.seq_len, kernels)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


CONFIGS = {**{name: (name, "") for name in PRESETS}, **{name: ("tiny", words) for name, words in VARIANTS.items()}}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_has_the_name_shape_and_cut_the_anatomy_says(name: str):
    config = resolve_recipe(CONFIGS[name][0], [*CONFIGS[name][1].split(), SHORT])
    model = build(config, "meta")
    found = shapes(model)
    assert found == parameter_shapes(config.model)
    sizes = {name: prod(shape) for name, shape in found.items()}
    ahead = sum(size for name, size in sizes.items() if name.startswith("ahead."))
    assert ahead == mtp_parameters(config.model)
    assert sum(sizes.values()) - ahead == total_parameters(config.model)
    require_cuts(model, config.model)


def require_cuts(built: Transformer, model: ModelConfig) -> None:
    """Every parameter is cut as the anatomy says."""
    placed = {p.name: p.declaration.placement for p in declared_parameters(built)}
    every = (*prefixed_model_steps(model), *prefixed_mtp_steps(model))
    said = {prefix + w.name: w.cut for prefix, step in every for w in step.weights}
    assert {name: each.cut for name, each in placed.items()} == said
    expert = {name for name, each in placed.items() if each.grid == "expert"}
    assert expert == {name for name, cut in said.items() if (0, "ep") in cut}


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-tiny", "glm-4.5-air-tiny"])
def test_a_layer_ahead_is_a_block_with_two_norms_a_join_and_a_norm_of_its_own(name: str):
    model = PRESETS[name]().model
    d = model.hidden
    ahead = {n.removeprefix("ahead.0."): s for n, s in parameter_shapes(model).items() if n.startswith("ahead.")}
    last = f"blocks.{model.layers - 1}."
    block = {n.removeprefix(last): s for n, s in parameter_shapes(model).items() if n.startswith(last)}
    own = {"stream_norm.weight": (d,), "token_norm.weight": (d,), "join.weight": (d, 2 * d), "norm.weight": (d,)}
    assert ahead == {**own, **{f"block.{n}": s for n, s in block.items()}}


def expert_size(model: ModelConfig) -> int:
    width, biases = dispatched_width(model), 2 * model.moe.ffn + dispatched_width(model)
    return 3 * model.moe.ffn * width + (biases if model.moe.biases else 0)


@pytest.mark.parametrize("name", PRESETS)
def test_active_parameters_are_all_but_the_experts_a_token_does_not_visit(name: str):
    model = PRESETS[name]().model
    idle = model.moe.experts - model.moe.top_k
    layers = sum(is_moe_layer(model, layer) for layer in range(model.layers))
    assert total_parameters(model) - active_parameters(model) == layers * idle * expert_size(model)
    every = replace(model, moe=replace(model.moe, top_k=model.moe.experts))
    assert active_parameters(every) == total_parameters(every)


@pytest.mark.parametrize(
    ("name", "seq_len", "mtp", "published"),
    [
        ("deepseek-v3", 4096, 1, 260.0e9),
        ("deepseek-v3", 4096, 0, 249.8e9),
        ("qwen3-235b-a22b", 4096, 0, 148.0e9),
        ("qwen3-235b-a22b", 131_072, 0, 734.7e9),
        ("qwen3-30b-a3b", 4096, 0, 23.006e9),
    ],
)
def test_flops_per_token_are_the_published_ones(name: str, seq_len: int, mtp: int, published: float):
    model = replace(PRESETS[name]().model, mtp=mtp)
    assert train_flops_per_token(model, seq_len) == pytest.approx(published, rel=5e-4)


def every_step(model: ModelConfig) -> Iterable[StepSpec]:
    return (step for _, step in (*prefixed_model_steps(model), *prefixed_mtp_steps(model)))


def not_counted(model: ModelConfig) -> int:
    """Forward of one token through every layer's router, which the published tables leave out."""
    return sum(2 * model.moe.experts * model.hidden for step in every_step(model) if step.name == "route")


def as_torch_counts(model: ModelConfig, seq_len: int) -> float:
    """Forward of one token as torch sees it: whole products of all queries with all keys, which causality and windows
    then hide a part of; and the router."""
    return sum(2 * (s.matmul + s.context * seq_len) for s in every_step(model)) + not_counted(model)


def test_scores_and_values_are_the_published_share_of_deepseek_v3_at_64k():
    """69.1 % of the forward pass, in which the router is counted."""
    model = replace(PRESETS["deepseek-v3"]().model, mtp=0)
    context = sum(2 * step.context * step.seen(65_536) for step in every_step(model))
    whole = sum(step.flops(65_536) for step in every_step(model)) + not_counted(model)
    assert context / whole == pytest.approx(0.691, abs=5e-4)


def grouped_mm(a: tuple[int, ...], b: tuple[int, ...], *_, **__) -> int:
    """Rows times matrices, or, for the matrices' gradient, rows times rows: each row meets one expert."""
    return 2 * a[-2] * a[-1] * b[-1]


ONE_CALL = {torch.ops.aten._grouped_mm: grouped_mm}
SMALL = ["--model.layers=4", "--model.hidden=64", "--data.seq_len=24", "--model.moe.ffn=48"]
MODELS = {
    **{name: (name, ["--data.seq_len=24"]) for name in TINY},
    **{name: ("tiny", [*words.split(), *SMALL]) for name, words in VARIANTS.items() if "one expert" not in name},
}


@pytest.mark.parametrize(
    ("name", "experts"), [*((name, "reference") for name in MODELS), *((name, "torch_grouped_mm") for name in TINY)]
)
def test_the_formula_is_what_torch_counts_on_the_real_model_forward_and_three_times_that_with_backward(
    name: str, experts: str
):
    """Attention is counted apart: the counter sees all of its products, the formula those that causality and windows
    leave. And the counter sees the router. Nothing else differs."""
    config = resolve_recipe(MODELS[name][0], MODELS[name][1])
    model = build(config, "cpu", [*COUNTED, f"grouped_gemm={experts}"])
    initialise_parameters(model, seed=1)
    b, s = 2, config.data.seq_len
    tokens, labels = torch.randint(256, (2, b, s), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False, custom_mapping=ONE_CALL) as counter:
        losses = model(tokens, labels)
        forward = counter.get_total_flops()
        (losses.cross_entropy + losses.balance + losses.ahead_M.sum()).backward()
    expected = b * s * as_torch_counts(config.model, s)
    assert forward == expected
    assert counter.get_total_flops() == 3 * expected


@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_leaves_out_of_what_torch_counts_the_router_and_what_attention_does_not_see(name: str):
    model, s = PRESETS[name]().model, 512
    hidden_keys = sum(2 * step.context * (s - step.seen(s)) for step in every_step(model))
    expected = 3 * (as_torch_counts(model, s) - not_counted(model) - hidden_keys)
    assert train_flops_per_token(model, s) == pytest.approx(expected, rel=1e-12)
    assert hidden_keys > 0


@pytest.mark.parametrize("window", [0, 1, 5, 16, 40])
@pytest.mark.parametrize("seq_len", [1, 6, 16, 33])
def test_a_token_sees_on_average_what_a_causal_mask_with_a_window_leaves_it(seq_len: int, window: int):
    """Its own key counts half, as in the published tables: s / 2 for (s + 1) / 2. Where a window hides the beginning,
    no more than the first tokens' halves are missing."""
    model = replace(PRESETS["tiny"]().model, attention=replace(PRESETS["tiny"]().model.attention, window=window))
    exact = sum(min(i + 1, window or i + 1) for i in range(seq_len)) / seq_len
    edge = min(window or seq_len, seq_len) / (2 * seq_len)
    assert attend_step(model, 0).seen(seq_len) == pytest.approx(exact - edge, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_layers_with_a_window_cost_no_more_for_longer_sequences(name: str):
    model = PRESETS[name]().model
    windowed, full = attend_step(model, 0), attend_step(model, 1)
    assert (windowed.window, full.window) == (128, 0)
    assert windowed.flops(131_072) - windowed.flops(4096) < 0.02 * windowed.flops(4096)
    assert full.flops(131_072) - full.flops(4096) == 2 * full.context * (131_072 - 4096) / 2


def test_the_half_of_causal_attention_that_the_formula_leaves_out_is_exactly_its_context_term():
    model = PRESETS["tiny"]().model
    a, s = model.attention, 256
    left_out = train_flops_per_token(model, 2 * s) - train_flops_per_token(model, s)
    assert left_out == 3 * model.layers * 2 * a.heads * a.head_dim * s


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "kimi-k2"])
def test_latent_attention_pays_for_its_own_widths(name: str):
    model = PRESETS[name]().model
    a, d = model.attention, model.hidden
    query = (d + a.heads * 192) * a.q_rank if a.q_rank else d * a.heads * 192
    latent = d * (512 + 64) + 512 * a.heads * (128 + 128)
    assert attend_step(model, 0).matmul == query + latent + d * a.heads * 128
    assert attend_step(model, 0).context == a.heads * (192 + 128)


def test_a_latent_of_a_quarter_with_four_times_the_experts_costs_the_same_but_for_its_two_matrices_and_the_router():
    plain, latent = (PRESETS[name]().model for name in ("qwen3-30b-a3b", "latent-30b-a3b"))
    d, matrices = plain.hidden, 48 * 2 * 2048 * 512
    assert latent.moe.latent * latent.moe.experts == d * plain.moe.experts
    assert latent.moe.latent * latent.moe.top_k == d * plain.moe.top_k, "as many bytes travel"
    router = 48 * d * (latent.moe.experts - plain.moe.experts)
    assert total_parameters(latent) - total_parameters(plain) == matrices + router
    assert active_parameters(latent) - active_parameters(plain) == matrices + router
    assert train_flops_per_token(latent, 4096) - train_flops_per_token(plain, 4096) == 6 * matrices


@pytest.mark.parametrize("name", [*VARIANTS, *TINY])
def test_the_steps_the_model_binds_are_those_of_the_anatomy(name: str):
    config = resolve_recipe(CONFIGS[name][0], [*CONFIGS[name][1].split(), SHORT])
    model = build(config, "meta")
    for layer, block in enumerate(model.blocks):
        assert [step.spec for step in block.steps()] == block_step_specs(config.model, layer)
    *body, predict = (step for _, step in prefixed_model_steps(config.model))
    assert [step.spec for step in model.steps(model.stages[0])] == [
        *body,
        *(step for _, step in prefixed_mtp_steps(config.model)),
        predict,
    ]
    assert [step.spec for step in model.eval().steps(model.stages[0])] == [*body, predict], (
        "further tokens are for training"
    )


@pytest.mark.parametrize("name", [*VARIANTS, *TINY])
def test_the_counts_after_a_step_are_those_of_the_layers_with_experts(name: str):
    config = resolve_recipe(CONFIGS[name][0], [*CONFIGS[name][1].split(), "--data.seq_len=16"])
    model = build(config, "cpu")
    initialise_parameters(model, seed=1)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens)
    layers = [layer for layer in range(config.model.layers + config.model.mtp) if is_moe_layer(config.model, layer)]
    found = model.balance()
    assert found.layers == layers
    assert found.counts_LE.shape[0] == len(layers)
    assert (found.counts_LE.sum(1) == 32 * config.model.moe.top_k).all()
    assert (found.dropped_L == 0).all()
