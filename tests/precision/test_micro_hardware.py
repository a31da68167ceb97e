"""Products of tensor cores: with stand-ins for torch's two functions, which read operands and scales in the layouts
that their interface has, layers have the results of the emulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moefold.kernels.facts import Facts
from moefold.kernels.quantise.mx_blocks import dequantise_mx
from moefold.kernels.quantise.nv_blocks import dequantise_nv
from moefold.kernels.quantise.scale_swizzle import unswizzle_scales
from moefold.precision.micro_hardware import HardwareProducts
from tests.precision.test_microscaling import BOUND, KERNELS, dense_results, error, grouped_results, recipe_of

MX, NV = ScalingType.BlockWise1x32, ScalingType.BlockWise1x16
SWIZZLED = SwizzleType.SWIZZLE_32_4_4
CALLS: list[str] = []


def lines(values: Tensor, scales: Tensor, scaling: Any) -> Tensor:
    """What lines (M, K) with swizzled scales stand for."""
    assert values.is_contiguous()
    if scaling == MX:
        assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        plain = unswizzle_scales(scales.view(torch.uint8), len(values), values.shape[1] // 32)
        return dequantise_mx(values, plain, torch.float32)
    assert (values.dtype, scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    plain = unswizzle_scales(scales.view(torch.uint8), len(values), values.shape[1] // 8)
    return dequantise_nv(values.view(torch.uint8), plain.view(torch.float8_e4m3fn), torch.float32)


def scaled_mm(a, b, a_scales, a_scaling, b_scales, b_scaling, a_swizzle, b_swizzle) -> Tensor:
    """(M, K) times (K, N), the second in columns."""
    assert (a_scaling, a_swizzle, b_swizzle) == (b_scaling, SWIZZLED, SWIZZLED)
    CALLS.append("dense")
    return lines(a, a_scales.flatten(), a_scaling) @ lines(b.t(), b_scales.flatten(), b_scaling).T


def scaled_grouped_mm(a, b, a_scales, a_scaling, b_scales, b_scaling, a_swizzle, b_swizzle, offs) -> Tensor:
    """(M, K) in groups times (E, K, N); scales of a group begin at 128 rows."""
    assert (a_scaling, a_swizzle, b_swizzle) == (b_scaling, SWIZZLED, SWIZZLED)
    assert a_scales.dim() == b_scales.dim() == 2
    CALLS.append("grouped")
    out = torch.zeros(len(a), b.shape[2])
    first, tile = 0, 0
    for expert, end in enumerate(offs.tolist()):
        tiles = -(-(end - first) // 128)
        scales = a_scales[tile : tile + 128 * tiles].flatten()
        if tiles:
            right = lines(b[expert].mT, b_scales[expert], b_scaling)
            out[first:end] = lines(a[first:end], scales, a_scaling) @ right.T
        first, tile = end, tile + 128 * tiles
    return out


def on_hardware(name: str, *shape: int, **options: Any):
    recipe = recipe_of(name, *shape, **options)
    recipe.format.is_emulated = False
    recipe.products = HardwareProducts(recipe.format, KERNELS, scaled_mm, scaled_grouped_mm)
    return recipe


@pytest.mark.parametrize("blocks", ["rows", "squares"])
@pytest.mark.parametrize("name", BOUND)
def test_layers_have_the_results_of_the_emulation(name: str, blocks: str):
    CALLS.clear()
    mine = dense_results(on_hardware(name, 112, 80, weight_blocks=blocks))
    for a, b in zip(mine, dense_results(recipe_of(name, 112, 80, weight_blocks=blocks)), strict=True):
        assert error(a, b) < 1e-6
    assert CALLS == ["dense"] * 3
    CALLS.clear()
    counts = [130, 0, 70]
    mine = grouped_results(on_hardware(name, 3, 96, 64, stacked=True, weight_blocks=blocks), counts, 5)
    right = grouped_results(recipe_of(name, 3, 96, 64, stacked=True, weight_blocks=blocks), counts, 5)
    for a, b in zip(mine, right, strict=True):
        assert error(a, b) < 1e-6
    assert (["grouped"] * 2 if name == "mxfp8" else []) == CALLS


def test_only_blackwells_data_centre_cards_are_said_to_have_the_formats():
    has = {capability: Facts("cuda", "bf16", capability).multiplies_micro_formats for capability in ((9, 0), (10, 0))}
    assert has == {(9, 0): False, (10, 0): True}
