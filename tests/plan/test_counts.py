"""Counts of one rank against the anatomy, published FLOPs and volumes, and bytes that real modules send."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.anatomy.counts import parameters_ahead, total_parameters
from moefold.comm.traffic import counted
from moefold.config.run import ModelConfig, ParallelConfig
from moefold.kernels.bind import bind
from moefold.kernels.catalog import Facts
from moefold.layout.axes import World, name_axes
from moefold.model.attention.context import choose_context
from moefold.model.block import ATTENTIONS
from moefold.model.choices import Choices as ModelChoices
from moefold.model.initialise import initialise
from moefold.model.share import Share
from moefold.plan.choices import Choices
from moefold.plan.counts import PieceCount, StepCount, alike, piece_count
from moefold.plan.sizes import Portion, Sizes
from moefold.presets.zoo import PRESETS
from tests.model.test_attention_traffic import BATCH, LATENT, LENGTH, MODEL, N
from tests.model.test_attention_traffic import sent as sent_ahead
from tests.support.ranks import run_ranks

PLAIN = Choices(stack="megatron", spread=0.0)
DEGREES = [{}, {"tp": 2}, {"cp": 4}, {"ep": 8}, {"tp": 2, "cp": 2, "ep": 4, "etp": 2}]


def pieces(model: ModelConfig, portion: Portion, choices: Choices = PLAIN) -> list[PieceCount]:
    layers = [("t", layer) for layer in range(model.layers)]
    ahead = [("m", model.layers + depth) for depth in range(model.mtp)]
    every = [("E", 0), *layers, *ahead, ("L", 0)]
    return [piece_count(model, piece, alike(model)[layer], portion, choices) for piece, layer in every]


def steps(model: ModelConfig, portion: Portion) -> list[StepCount]:
    return [step for piece in pieces(model, portion) for step in piece.steps]


@pytest.mark.parametrize("degrees", DEGREES)
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
def test_flops_are_the_published_ones_on_any_layout(name: str, seq_len: int, mtp: int, published: float, degrees):
    model = replace(PRESETS[name]().model, mtp=mtp)
    portion = Portion(seq_len, 2, **degrees)
    assert 3 * sum(step.flops for step in steps(model, portion)) / portion.tokens == pytest.approx(published, rel=5e-4)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", PRESETS)
def test_products_with_weights_and_attention_are_all_flops_there_are(name: str, degrees: dict[str, int]):
    """But for the router, which published FLOPs leave out."""
    model = PRESETS[name]().model
    for step in steps(model, Portion(512, 1, **degrees)):
        products = sum(gemm.flops for gemm in step.gemms if gemm.kind != "router")
        assert products + step.attention == pytest.approx(step.flops, rel=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_all_ranks_together_hold_the_model_once_where_nothing_is_replicated(name: str):
    model = PRESETS[name]().model
    whole = sum(sum(piece.parameters.values()) for piece in pieces(model, Portion(512)))
    assert whole == total_parameters(model) + parameters_ahead(model)
    for degrees in DEGREES:
        cut = {axis: degrees.get(axis, 1) for axis in ("tp", "ep", "etp")}
        found = 0.0
        for piece in pieces(model, Portion(512, **degrees)):
            for (_, axes), count in piece.parameters.items():
                for axis in axes:
                    count *= cut[axis]
                found += count
        assert found == pytest.approx(whole, rel=1e-12)


def sent(model: ModelConfig, portion: Portion, names: tuple[str, ...], choices: Choices = PLAIN) -> float:
    """Elements that leave a rank in forward."""
    found = piece_count(model, "t", model.layers - 1, portion, choices)
    total = sum(each.forward for step in found.steps if step.name in names for each in step.sent)
    return total / choices.recipe.wide


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("n", [2, 4])
def test_volumes_of_megascale(name: str, n: int):
    """TP attention 2bsh(n-1)/n; SP (2+2/m)/n of bsh(n-1)/n; EP 2k/n of it; gathering and scattering 2 of it, which is
    less than all-to-all from k > n on. Heads make the stream's width in these models, or twice that."""
    model = PRESETS[name]().model
    b, s, h = 2, 4096, model.hidden
    a, k = model.attention, model.moe.top_k
    wide, m = a.heads * a.head_dim / h, a.heads / a.kv_heads
    volume = b * s * h * (n - 1) / n
    assert sent(model, Portion(s, b, tp=n), ("attend",)) == 2 * volume
    swapping = Portion(s, b, cp=n, context="all_to_all")
    assert sent(model, swapping, ("attend",)) == pytest.approx(volume * wide * (2 + 2 / m) / n)
    for dispatcher, expected in (("all_to_all", 2 * k / n * volume), ("all_gather", 2 * volume)):
        spread = Portion(s, b, cp=n, ep=n, dispatcher=dispatcher)
        assert sent(model, spread, ("dispatch", "combine")) == pytest.approx(expected)


def test_a_token_sent_once_to_each_rank_is_sent_less_often_than_once_to_each_expert():
    model = PRESETS["deepseek-v3"]().model
    often, once, nodes = (
        sent(model, Portion(4096, ep=64, dispatcher=name), ("dispatch",)) / (4096 * 7168)
        for name in ("all_to_all", "dedup", "hierarchical")
    )
    assert often == 8 * 63 / 64
    assert once == pytest.approx(64 * (1 - (63 / 64) ** 8) * 63 / 64)
    assert nodes > once, "twice on the way, but less between nodes"
    (between, _) = piece_count(model, "t", 60, Portion(4096, ep=64, dispatcher="hierarchical"), PLAIN).steps[2].sent
    assert between.axis == "ep nodes"
    assert between.forward / 2 < 0.8 * once * 4096 * 7168


def test_deepseek_v3_dispatches_and_combines_116_times_a_forward():
    model = replace(PRESETS["deepseek-v3"]().model, mtp=0)
    travelling = [step for step in steps(model, Portion(4096, ep=64)) if step.spec.lane == "comm"]
    assert len(travelling) == 116


def test_tokens_that_travel_in_fp8_are_half_as_many_bytes_one_way():
    model = PRESETS["qwen3-30b-a3b"]().model
    for step, ratio in (("dispatch", (1 + 4 / 128) / 2), ("combine", 1.0)):
        plain, fp8 = (
            sent(model, Portion(4096, ep=8), (step,), replace(PLAIN, travel=travel)) for travel in ("bf16", "fp8")
        )
        assert fp8 / plain == pytest.approx(ratio)


def sent_both_ways(world: World, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Bytes that leave this rank in forward and backward of real attention."""
    world = name_axes(world.rank, world.size, world.device, parallel)
    kernels = bind(Facts("cpu", "fp32", hidden=model.hidden))
    context = choose_context(parallel.context, kernels, world)
    made = ModelChoices(world, kernels, None, context, LENGTH)  # pyright: ignore
    attention = ATTENTIONS[model.attention.kind](model, 0, made)
    initialise(attention, seed=1)
    share = Share(BATCH, LENGTH, world.axis("cp"), world.axis("tp"), torch.device("cpu"))
    with counted() as counter:
        x_TD = torch.ones(BATCH * LENGTH // N, model.hidden, requires_grad=True)
        attention(x_TD, share).sum().backward()
    return sum(counter.values())


@pytest.mark.parametrize("model", [MODEL, LATENT])
@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tp=4), *(ParallelConfig(cp=4, context=c) for c in ("all_to_all", "all_gather", "ring"))]
)
def test_real_attention_sends_what_is_counted_there_and_back(model: ModelConfig, parallel: ParallelConfig):
    p = parallel
    portion = Portion(LENGTH, BATCH, p.tp, p.cp, context=p.context)
    said = piece_count(model, "t", 0, portion, Choices(precision="fp32", device="cpu")).steps[0].sent
    for ahead in run_ranks(sent_ahead, N, model, parallel):
        assert sum(ahead.values()) == sum(each.forward for each in said)
    for both in run_ranks(sent_both_ways, N, model, parallel):
        assert both == sum(each.forward + each.backward for each in said)


FIGURE_9 = {  # of MegaScale-MoE: every activation of a layer, and whether it is kept; elements over b s h / n
    "hidden": (lambda z: z.T * z.D, True),
    "ln1_out": (lambda z: z.T * z.D, False),
    "qkv": (lambda z: z.T * (z.H * z.Q + 2 * z.G * z.Q), False),
    "q_rope": (lambda z: z.T * z.H * z.Q, False),
    "k_rope": (lambda z: z.T * z.G * z.Q, False),
    "qkv_a2a": (lambda z: z.C * (z.H * z.Q + 2 * z.G * z.Q), True),
    "attn": (lambda z: z.C * z.H * z.V, True),
    "attn_a2a": (lambda z: z.T * z.H * z.V, False),
    "attn_out": (lambda z: z.T * z.D, False),
    "ln2_in": (lambda z: z.T * z.D, True),
    "ln2_out": (lambda z: z.T * z.D, False),
    "ln2_out_ag": (lambda z: z.N * z.W, False),
    "ffn_in": (lambda z: z.R * z.W, False),
    "fc1_out": (lambda z: z.R * z.F, True),
    "fc3_out": (lambda z: z.R * z.F, True),
    "fc2_in": (lambda z: z.R * z.F, False),
    "fc2_out": (lambda z: z.R * z.W, False),
    "fc2_out_rs": (lambda z: z.N * z.W, False),
    "ffn_out": (lambda z: z.T * z.D, False),
    "hidden of the next": (lambda z: z.T * z.D, False),
}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b"])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_letters_of_a_rank_make_the_formulas_of_megascale(name: str, n: int):
    """All activations (2n + 2k + 3kf + 12 + 5/m) bsh/n, kept (2kf + 4 + 2/m) bsh/n, with attention that swaps heads and
    experts that gather tokens."""
    model = PRESETS[name]().model
    a, moe = model.attention, model.moe
    m, k, f = a.heads / a.kv_heads, moe.top_k, moe.ffn / model.hidden
    z = Sizes(model, Portion(4096, 2, cp=n, ep=n, context="all_to_all", dispatcher="all_gather"), PLAIN)
    unit = 2 * 4096 * model.hidden / n
    assert sum(size(z) for size, _ in FIGURE_9.values()) / unit == pytest.approx(2 * n + 2 * k + 3 * k * f + 12 + 5 / m)
    assert sum(size(z) for size, kept in FIGURE_9.values() if kept) / unit == pytest.approx(2 * k * f + 4 + 2 / m)


def test_experts_cut_over_ranks_get_the_rows_of_all_of_them():
    model = PRESETS["mixtral-8x7b"]().model
    whole, cut = (Sizes(model, Portion(4096, cp=4, ep=2, etp=etp), PLAIN) for etp in (1, 2))
    assert (cut.R, cut.F) == (2 * whole.R, whole.F / 2)


def test_layers_that_are_alike_are_counted_once():
    assert alike(PRESETS["deepseek-v3"]().model) == (0,) * 3 + (3,) * 59
    assert alike(PRESETS["gpt-oss-20b"]().model) == (0, 1) * 12
