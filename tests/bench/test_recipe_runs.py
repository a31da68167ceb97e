"""Runs of `moefold bench recipes`: the share of parameters that stays plain, by hand."""

from __future__ import annotations

import pytest

from moefold.bench.formats import VARIANTS
from moefold.bench.options import RecipesOptions
from moefold.bench.recipe_runs import model_for_gpu, plain_share, variant_config


def test_one_layer_of_eight_stays_plain_in_nvfp4_below_16_percent_of_linear_parameters():
    config = model_for_gpu(RecipesOptions())
    attention = 512 * (512 + 2 * 128) + 512 * 512
    experts = 32 * (2 * 512 + 512) * 512
    router, head = 32 * 512, 256 * 512
    every = 8 * (attention + experts + router) + head
    assert plain_share(variant_config(config, "bf16", 1)) == 1.0
    assert plain_share(variant_config(config, "mxfp8", 1)) == pytest.approx((8 * router + head) / every)
    left = attention + experts + 8 * router + head
    for name in VARIANTS:
        if name.startswith("nvfp4"):
            share = plain_share(variant_config(config, name, 1))
            assert share == pytest.approx(left / every)
            assert share < 0.16
