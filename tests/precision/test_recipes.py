"""Recipes are attached by name pattern; names that fit nothing are refused, with the nearest that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig, MoeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_mlp import expert_mlp
from moefold.kernels.facts import Facts
from moefold.kernels.linear.product import PLAIN
from moefold.layout.axes import single_rank_world
from moefold.model.moe.experts import Experts
from moefold.precision import recipes
from moefold.precision.recipes import RecipeState, attach_recipes, named_products
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run, build_model, choose_kernels
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step
from tests.support.toy_recipes import DelayedScaleRecipe, RoundedRecipe

KERNELS = BoundKernels(Facts("cpu", "fp32", hidden=128, ffn=64))
ROUNDED = RoundedRecipe()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(recipes.RECIPES, "rounded", lambda kernels, options: lambda name, product: ROUNDED)
    monkeypatch.setitem(
        recipes.RECIPES, "delayed_scale", lambda kernels, options: lambda name, product: DelayedScaleRecipe()
    )
    config = resolve_recipe("tiny", ["--train.device=cpu", "--train.precision=fp32", "--model.layers=2"])
    world = single_rank_world()
    return build_model(config, world, choose_kernels(config, world))


def test_every_product_of_a_model_has_a_name_and_is_plain_at_first(model):
    products = named_products(model)
    assert {"blocks.1.attention.query", "blocks.1.moe.experts.up_product", "blocks.1.moe.experts.down_product"} <= {
        *products
    }
    assert all(product.recipe is PLAIN for product in products.values())
    assert dict(RecipeState(model).named_state()) == {}


def test_the_last_pattern_that_matches_counts_and_the_rest_is_plain(model):
    attach_recipes(model, {"blocks.*.experts.*": "rounded", "blocks.1.*.down_product": "plain"}, KERNELS)
    rounded = {name for name, product in named_products(model).items() if product.recipe is ROUNDED}
    assert rounded == {
        "blocks.0.moe.experts.up_product",
        "blocks.0.moe.experts.down_product",
        "blocks.1.moe.experts.up_product",
    }


def test_patterns_and_recipes_that_fit_nothing_are_refused_with_the_nearest(model):
    with pytest.raises(UserError, match=r'no product of the model matches "blocks\.0\.atention\.out".*attention\.out'):
        attach_recipes(model, {"blocks.0.atention.out": "rounded"}, KERNELS)
    with pytest.raises(UserError, match=r'no precision recipe "ronded".*rounded'):
        attach_recipes(model, {"*": "ronded"}, KERNELS)
    attach_recipes(model, {"blocks.7.*": "rounded"}, KERNELS, held_elsewhere=["blocks.7.attention.out"])


def test_kernels_are_chosen_for_the_recipe_of_a_product_and_for_none_where_two_recipes_meet(model):
    attach_recipes(model, {"blocks.*.up_product": "rounded", "blocks.0.*.down_product": "rounded"}, KERNELS)
    first, second = (model.blocks[number].moe.experts for number in (0, 1))
    assert first.recipe_name == "rounded"
    assert second.recipe_name == "mixed"


def test_a_model_trains_under_a_recipe_and_its_state_is_listed_by_product(model):
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 17))
    plain = run_loss(model, ids)
    attach_recipes(model, {"*": "rounded"}, KERNELS)
    rounded = run_loss(model, ids)
    assert 0 < abs(rounded - plain) < 0.05 * abs(plain)
    attach_recipes(model, {"blocks.0.attention.*": "delayed_scale"}, KERNELS)
    assert abs(run_loss(model, ids) - plain) < 1e-4 * abs(plain)
    state = dict(RecipeState(model).named_state())
    assert sorted(state) == [f"blocks.0.attention.{name}.input_maximum" for name in ("key", "out", "query", "value")]
    assert all(float(tensor) > 0 for tensor in state.values())


def run_loss(model, ids: torch.Tensor) -> float:
    loss = model(ids[:, :-1], ids[:, 1:]).cross_entropy
    model.zero_grad()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return loss.item()


def test_experts_that_the_fused_kernel_does_not_fit_never_get_it_whatever_kernels_are_attached():
    """The facts of a run say it, and so does the layer itself."""
    hopper = BoundKernels(Facts("cuda", "bf16", (9, 0), hidden=64, ffn=64, triton=True))
    for biases in (False, True):
        moe = MoeConfig(experts=4, top_k=2, ffn=64, biases=biases)
        experts = Experts(ModelConfig(hidden=64, moe=moe), hopper, single_rank_world())
        attach_recipes(experts, {}, hopper)
        assert experts.expert_mlp is expert_mlp.implementations["reference" if biases else "gluon"]


def test_checkpoints_of_a_run_list_the_state_of_its_recipes(model, tmp_path: Path):
    config = shrink_config(PRESETS["tiny"](), 1)
    run = assemble_run(config, single_rank_world(), tmp_path, random_corpus(config))
    attach_recipes(run.model, {"blocks.0.attention.out": "delayed_scale"}, KERNELS)
    train_step(run, run.loader.next_batch())
    tensors = collect_tensors(run.model, run.optimizer, run.further_state)
    listed = [name for name in tensors if name.startswith("precision.")]
    assert listed == ["precision.blocks.0.attention.out.input_maximum"]
    assert float(tensors[listed[0]]) > 0
