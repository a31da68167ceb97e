"""A base in blocks: which products it has, its bytes, and inputs that ranks would cut inside a block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.anatomy.frozen_base import base_products, base_size, base_size_of_all_ranks
from moefold.anatomy.model_totals import total_parameters
from moefold.config.errors import UserError
from moefold.config.run import Config, LoraConfig, ParallelConfig
from moefold.kernels.facts import facts_from_config
from moefold.presets.zoo import PRESETS

BITS = {"fp8": 8 + 8 / 128, "nf4": 4 + 16 / 64, "mxfp4": 4 + 8 / 32}  # of a bf16 model's weight, with its scale


def with_base(base: str, preset: str = "qwen3-30b-a3b", targets: tuple[str, ...] = ()) -> Config:
    lora = LoraConfig(rank=16, base=base, targets=targets)  # pyright: ignore[reportArgumentType]
    return replace(PRESETS[preset](), lora=lora)


@pytest.mark.parametrize("base", BITS)
def test_all_but_embedding_head_routers_and_norms_is_in_blocks(base: str):
    config = with_base(base)
    model = config.model
    weights, size = base_size_of_all_ranks(config, 2)
    beside = 2 * model.vocab * model.hidden + model.layers * model.moe.experts * model.hidden
    norms = total_parameters(model) - beside - weights
    assert 0 < norms < 1e6
    assert size == weights * BITS[base] / 8


def test_scales_of_scales_are_counted_by_row():
    """A byte for 64 values, and four for 2,048 or for what a row has: 768 of an expert's down projection."""
    config = with_base("nf4_double")
    nf4_double = base_size_of_all_ranks(config, 2)
    down = config.model.layers * config.model.moe.experts * config.model.hidden * 768
    up_and_attention = nf4_double.weights - down
    assert nf4_double.bytes == up_and_attention * (4.125 + 32 / 2048) / 8 + down * (4.125 + 32 / 768) / 8


def test_products_without_adapters_are_in_blocks_too():
    config = with_base("nf4", targets=("*.attention.*",))
    assert any("experts" in product.name for product in base_products(config))
    assert facts_from_config(config, "cuda", "bf16", (9, 0)).unfused_experts == "", "fused with a frozen base too"
    assert base_products(with_base("plain")) == []


def test_a_rank_holds_its_experts_and_its_parts():
    config = with_base("nf4")
    spread = replace(config, parallel=ParallelConfig(ep=8, tp=2))
    experts = [product for product in base_products(config) if "experts" in product.name]
    whole = sum(product.inputs * product.outputs for product in experts) * config.model.moe.experts
    rest = base_size(config, 2).weights - whole
    assert base_size(spread, 2).weights == whole / 8 + rest / 2


def test_inputs_that_ranks_cut_inside_a_block_are_refused_by_name():
    config = with_base("nf4", "deepseek-v2-lite")
    cut = replace(config, parallel=ParallelConfig(etp=4))
    with pytest.raises(
        UserError, match=r"experts\.down_product has 1408 inputs, 352 on a rank; lora\.base = nf4 needs"
    ):
        base_products(cut)
    assert base_products(replace(cut, lora=replace(cut.lora, base="mxfp4")))
    with pytest.raises(UserError, match=r"lora\.base = nf4_double needs multiples of 2048"):
        base_products(replace(cut, lora=replace(cut.lora, base="nf4_double")))
