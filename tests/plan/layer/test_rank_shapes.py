"""The letters of one rank."""

from __future__ import annotations

import pytest

from moefold.cli.explain import distinct_layers, kernel_choices
from moefold.kernels.facts import facts_from_config
from moefold.plan.layer.rank_shapes import RankPortion, RankShapes
from moefold.plan.memory.run_setting import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from tests.plan.layer.test_layer_costs import PLAIN

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
    z = RankShapes(model, RankPortion(4096, 2, cp=n, ep=n, context="all_to_all", dispatcher="all_gather"), PLAIN)
    unit = 2 * 4096 * model.hidden / n
    assert sum(size(z) for size, _ in FIGURE_9.values()) / unit == pytest.approx(2 * n + 2 * k + 3 * k * f + 12 + 5 / m)
    assert sum(size(z) for size, kept in FIGURE_9.values() if kept) / unit == pytest.approx(2 * k * f + 4 + 2 / m)


def test_experts_cut_over_ranks_get_the_rows_of_all_of_them():
    model = PRESETS["mixtral-8x7b"]().model
    whole, cut = (RankShapes(model, RankPortion(4096, cp=4, ep=2, etp=etp), PLAIN) for etp in (1, 2))
    assert (cut.R, cut.F) == (2 * whole.R, whole.F / 2)


@pytest.mark.parametrize("pipeline", ["", "pair=true", "pair=true fill=false", "defer=true", "schedule=zb_h1"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_experts_run_as_one_kernel_where_explain_says_so(model: str, pipeline: str, capability: tuple[int, int]):
    words = [f"--pipeline.{word}" for word in pipeline.split()]
    config = resolve_recipe(model, ["--parallel.pp=2", "--parallel.ep=4", "--train.global_batch=64", *words], 8)
    facts = facts_from_config(config, "cuda", "bf16", capability)
    explained = kernel_choices(config, distinct_layers(config.model), facts)
    fused = "expert_mlp" in explained and explained["expert_mlp"]["implementation"] != "reference"
    choices = PlanChoices(capability=10 * capability[0] + capability[1])
    shapes = build_run_setting(config, 8, choices).layer_shapes(0)
    assert shapes.fuses_experts == fused
