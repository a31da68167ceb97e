"""The products of a model by name are the model's own, and each has the recipe that the configuration says."""

from __future__ import annotations

import pytest

from moefold.anatomy.products import model_products, product_recipes
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.axes import single_rank_world
from moefold.precision.recipes import named_products
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import build_model, choose_kernels, resolve_auto_values
from moefold.train.parity import shrink_config

TINY = [name for name in PRESETS if name.endswith("tiny")]


UNGATED = ["--model.moe.activation=relu2", "--model.dense_activation=gelu", "--model.moe.shared_ffn=64"]


@pytest.mark.parametrize("name", [*TINY, "tiny without gates"])
def test_names_and_widths_are_those_of_the_modules(name: str):
    world = single_rank_world("cpu")
    found = resolve_recipe("tiny", [*UNGATED, "--model.moe.dense_layers=1"]) if "without" in name else PRESETS[name]()
    config = resolve_auto_values(shrink_config(found, 1), world)
    model = build_model(config, world, choose_kernels(config, world))
    products = {product.name: product for product in model_products(config.model, config.parallel)}
    assert set(products) == set(named_products(model))
    for path, module in named_products(model).items():
        weight = getattr(module, "weight", None)
        if weight is not None:
            assert weight.shape[-1] == products[path].inputs
            assert weight[..., 0].numel() == products[path].outputs


def chosen(*overrides: str) -> dict[str, str]:
    config: Config = resolve_recipe("tiny", ["--model.layers=4", "--model.moe.shared_ffn=32", *overrides], 1)
    return {each.product.name: each.recipe for each in product_recipes(config)}


def test_the_default_scope_is_attention_mlps_and_experts():
    words = ["--precision.recipe=fp8_block", "--model.moe.shared_gate=true", "--model.mtp=1", "--model.moe.latent=64"]
    plain = {name for name, recipe in chosen(*words).items() if recipe == "plain"}
    ends = {name.rpartition(".")[2] for name in plain}
    assert ends == {"gate", "join", "narrow", "widen"}
    assert chosen(*words)["ahead.0.block.moe.experts.up_product"] == "fp8_block"


def test_layers_are_excluded_and_the_last_entry_that_matches_counts():
    words = ["--precision.recipe=fp8_block", "--precision.exclude_first=1", "--precision.exclude_last=1"]
    entries = (
        "--precision.recipes=*.attention.*: fp8_row,blocks.0.attention.out: plain,blocks.3.*.up_product: fp8_tensor"
    )
    recipes = chosen(*words, entries)
    assert recipes["blocks.0.attention.query"] == "fp8_row"
    assert recipes["blocks.0.attention.out"] == "plain"
    assert recipes["blocks.0.moe.shared.down"] == "plain"
    assert recipes["blocks.1.moe.shared.down"] == "fp8_block"
    assert recipes["blocks.3.moe.experts.up_product"] == "fp8_tensor"
    assert recipes["blocks.3.moe.experts.down_product"] == "plain"


def test_entries_without_a_product_and_widths_that_do_not_fit_are_refused_together():
    with pytest.raises(UserError) as refused:
        chosen("--precision.recipes=*.atention.out: fp8_row,*.shared.*: fp8_block", "--model.moe.shared_gate=true")
    assert len(refused.value.problems) == 1 + 4
    assert 'no product of the model matches "*.atention.out"' in refused.value.problems[0]
    assert "blocks.0.moe.shared.gate has 128 inputs and 1 outputs on a rank" in refused.value.problems[1]
    assert "multiples of 16" in refused.value.problems[1]


def test_widths_are_those_of_one_rank():
    config = resolve_recipe("tiny", ["--parallel.tp=2", "--precision.recipes=*.attention.key: fp8_row"], 2)
    (key,) = {each.product.outputs for each in product_recipes(config) if each.product.place == "attention.key"}
    assert key == 32
    narrow = ["--parallel.tp=2", "--model.attention.head_dim=24", "--precision.recipes=*.attention.key: fp8_row"]
    with pytest.raises(UserError, match=r"attention\.key has 128 inputs and 24 outputs on a rank; fp8_row needs"):
        product_recipes(resolve_recipe("tiny", narrow, 2))
