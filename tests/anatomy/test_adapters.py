"""Targets of adapters: products by name pattern, ranks and scales; patterns that match nothing are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.anatomy.adapters import adapter_specs
from moefold.anatomy.products import model_products
from moefold.config.errors import UserError
from moefold.config.lora_targets import parse_targets
from moefold.config.run import Config, LoraConfig, ParallelConfig
from moefold.kernels.facts import Facts, facts_from_config
from moefold.presets.zoo import PRESETS


def adapted(*targets: str, preset: str = "deepseek-v3", rs: bool = False) -> Config:
    return replace(PRESETS[preset](), lora=LoraConfig(rank=16, alpha=32.0, rs=rs, targets=targets))


def places(config: Config) -> set[str]:
    return {spec.product.place for spec in adapter_specs(config)}


@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen2-57b-a14b", "latent-30b-a3b"])
def test_default_targets_are_all_products_of_the_layers_but_gates_of_one_output(preset: str):
    config = adapted(preset=preset)
    names = {spec.product.name for spec in adapter_specs(config)}
    products = {product.name for product in model_products(config.model, config.parallel)}
    left = products - names
    assert names
    assert all("attention" in n or "dense" in n or "shared" in n or "experts" in n for n in names)
    assert all(name.startswith("ahead.") or name.endswith((".shared.gate", ".narrow", ".widen")) for name in left)


def test_the_last_match_counts_and_none_excludes():
    config = adapted("*.attention.*", "*.attention.out: rank=4 alpha=8", "blocks.0.*: none")
    specs = {spec.product.name: spec for spec in adapter_specs(config)}
    assert specs["blocks.1.attention.out"].rank == 4
    assert specs["blocks.1.attention.out"].scale == 2.0
    assert specs["blocks.1.attention.query"].rank == 16
    assert not [name for name in specs if name.startswith("blocks.0.")]
    assert places(config)
    assert all(place.startswith("attention.") for place in places(config))
    # with exclusions alone, the rest is as by default
    without = places(adapted("*.experts.*: none"))
    assert "moe.shared.down" in without
    assert "moe.experts.down_product" not in without


def test_routers_have_adapters_only_where_a_pattern_names_them():
    assert places(adapted("*.router")) == {"moe.router"}
    assert "moe.router" not in places(adapted("blocks.4.*"))
    assert places(adapted("*.attention.*", "blocks.4.moe.router: rank=2")) > {"moe.router", "attention.out"}
    config = adapted("*.router")
    jitter = replace(config.model.moe.router, jitter=0.1)
    moe = replace(config.model.moe, router=jitter)
    with pytest.raises(UserError, match=r"set model\.moe\.router\.jitter to 0"):
        adapter_specs(replace(config, model=replace(config.model, moe=moe)))


def test_scales_are_alpha_over_the_rank_or_its_root():
    assert {spec.scale for spec in adapter_specs(adapted())} == {2.0}
    assert {spec.scale for spec in adapter_specs(adapted(rs=True))} == {8.0}


def test_a_pattern_that_matches_nothing_is_refused_by_name():
    with pytest.raises(UserError, match=r'no product of the model matches "\*\.experts\.gate"'):
        adapter_specs(adapted("*.attention.*", "*.experts.gate"))
    with pytest.raises(UserError, match="excludes every product"):
        adapter_specs(adapted("*: none"))


@pytest.mark.parametrize("entry", ["", "*.out: rank=0", "*.out: rank=2.5", "*.out: alpha=-1", "*.out: rnak=4"])
def test_entries_that_cannot_be_read_are_refused(entry: str):
    with pytest.raises(UserError, match=r"lora\.targets"):
        parse_targets([entry])


def test_parameters_are_those_of_one_rank():
    config = replace(adapted("blocks.3.moe.experts.down_product"), parallel=ParallelConfig(ep=8))
    (spec,) = adapter_specs(config)
    moe = config.model.moe
    assert spec.parameters == moe.experts // 8 * 16 * (moe.ffn + config.model.hidden)


def test_adapted_experts_keep_the_fused_kernel_unless_inputs_are_dropped_or_ranks_are_odd():
    def facts(config: Config) -> Facts:
        return facts_from_config(config, "cuda", "bf16", (9, 0))

    experts = facts(adapted())
    assert (experts.adapted_experts, experts.unfused_experts) == ("lora.rank = 16", "")
    attention = facts(adapted("*.attention.*"))
    assert (attention.adapted_experts, attention.unfused_experts) == ("", "")
    assert facts(adapted("*.experts.*: rank=12")).unfused_experts == "lora.rank = 12"
    dropped = replace(adapted(), lora=replace(adapted().lora, dropout=0.1))
    assert facts(dropped).unfused_experts == "lora.dropout"
