"""What `explain` says of products: every one once, with its recipe, what the recipe reads, and why."""

from __future__ import annotations

from moefold.anatomy.product_formats import experts_recipe, product_formats, recipe_in_words
from moefold.anatomy.products import product_recipes
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import Config, PrecisionConfig
from moefold.presets.recipe import resolve_recipe


def tiny(*overrides: str) -> Config:
    return resolve_recipe("tiny", ["--model.layers=4", "--model.moe.dense_layers=1", *overrides], 1)


def test_layers_that_agree_are_told_together_and_every_product_is_counted():
    config = tiny("--precision.recipe=fp8_block", "--precision.exclude_last=1", "--model.mtp=1")
    formats = product_formats(config)
    assert sum(formats.values()) == len(product_recipes(config))
    found = {(each.where, each.product, each.recipe): (count, each.why) for each, count in formats.items()}
    assert found["dense layer", "dense.down", "fp8_block"] == (1, "precision.recipe")
    assert found["MoE layer", "attention.out", "fp8_block"] == (2, "precision.recipe")
    assert found["MoE layer", "attention.out", "plain"] == (1, "precision.exclude_last")
    assert found["layer ahead", "join", "plain"] == (1, "outside the scope of precision.recipe")


def test_a_recipe_is_told_by_what_its_products_read_and_how_they_sum():
    options = PrecisionConfig(gradient_format="e5m2", accumulate="fast")
    words = {name: recipe_in_words(name, options, "bf16") for name in RECIPE_SPECS}
    assert set(words["plain"].values()) == {"bf16"}
    assert words["fp8_hybrid"]["weight_gradient"] == "x and dy bf16"
    assert words["fp8_block"]["data_gradient"].startswith("dy e5m2, a scale for 128 values; W e4m3, a scale for 128 x")
    assert words["fp8_row"]["forward"].endswith("sums of the tensor core, scaled at the end")
    assert words["fp8_row"]["weight_gradient"].endswith("fp32 sums of blocks of 128, scaled at the end")


def test_micro_formats_are_told_with_their_options_and_that_they_are_emulated():
    nvfp4 = recipe_in_words("nvfp4", PrecisionConfig(), "bf16")
    assert all(text.endswith("emulated: product of dequantised operands") for text in nvfp4.values())
    assert nvfp4["forward"].startswith("x e2m1, an e4m3 scale and one of the matrix for 16 values; W e2m1")
    assert "16 x 16 values" in nvfp4["forward"]
    assert "stochastic rounding" in nvfp4["data_gradient"]
    assert "Hadamard" in nvfp4["weight_gradient"]
    bare = PrecisionConfig(hadamard=False, stochastic=False, weight_blocks="rows")
    assert not any(word in str(recipe_in_words("nvfp4", bare, "bf16")) for word in ("Hadamard", "stochastic", "x 16"))
    assert "W e4m3, a power of two for 32 values" in recipe_in_words("mxfp8", PrecisionConfig(), "bf16")["forward"]


def test_delayed_scales_are_told_where_a_recipe_has_them():
    options = PrecisionConfig(scaling="delayed", history=4)
    row = recipe_in_words("fp8_row", options, "bf16")
    assert row["forward"].startswith(
        "x e4m3, a scale for a tensor, or for the rows of an expert, from the last 4 steps"
    )
    assert "a scale for each channel of an expert's rows, from the last 4 steps" in row["weight_gradient"]
    assert recipe_in_words("fp8_block", options, "bf16") == recipe_in_words("fp8_block", PrecisionConfig(), "bf16")


def test_the_place_of_the_gate_is_advised_where_rows_share_a_scale():
    formats = product_formats(tiny("--precision.recipe=fp8_tensor"))
    advised = {each.product for each in formats if "model.moe.gate output" in each.why}
    assert advised == {"moe.experts.down_product"}
    outside = tiny("--precision.recipe=fp8_tensor", "--model.moe.gate=output")
    assert not any("model.moe.gate" in each.why for each in product_formats(outside))


def test_the_recipe_of_experts_decides_their_kernel():
    assert experts_recipe(tiny()) == "plain"
    assert experts_recipe(tiny("--precision.recipe=fp8_row", "--precision.exclude_first=2")) == "fp8_row"


def test_products_of_a_card_that_has_the_formats_are_not_called_emulated():
    words = recipe_in_words("mxfp8", PrecisionConfig(), "bf16", has_micro_formats=True)
    assert "tensor cores" in words["forward"]
    assert "emulated" not in words["forward"] + words["data_gradient"]
    assert words["weight_gradient"].endswith("emulated for experts")
    assert recipe_in_words("mxfp8", PrecisionConfig(), "bf16")["forward"].endswith("dequantised operands")
