"""Quantisation of a share of weights: any run of elements of a flat tensor that holds matrices one after another.

A share may begin and end within a block of 128 x 128 values. Ranks find the largest magnitudes of their shares, agree
on those of whole blocks, and cast their shares with the scales that follow:

    share_maxima        magnitudes of blocks, as far as the share holds values of the block
    cast_share          bytes of the share's elements
    transpose_values    the second layout, from the bytes of whole matrices

Values are rounded to the model's dtype before they are quantised: bytes are those of a model that keeps its weights.
E experts, N outputs, D inputs, I blocks of outputs, J blocks of inputs, B blocks of all matrices.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule, round_to_fp8, scale_from_amax
from moefold.kernels.quantise.matrix_places import MatrixPlace, Places
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

MAGNITUDE_BITS = 0x7FFFFFFF  # all bits of an fp32 number but its sign


@register_inner_op
def share_maxima(share: Tensor, begin: int, places: Places, dtype: torch.dtype) -> Tensor:
    """Bits of the largest magnitude of each block, (B,) of int32: they have the order of the magnitudes, NaN above
    infinity, and 0 where the share holds nothing of the block. `begin`: the share's place in the flat tensor."""
    maxima_B = no_maxima(share, places)
    for place in places:
        part = held_part(place, begin, len(share))
        held = share[part.window]
        values = as_in_model(held, dtype)
        signed_bits = values.view(torch.int32)
        bits = signed_bits & MAGNITUDE_BITS
        block = block_of_elements(part, share.device)
        maxima_B.scatter_reduce_(0, block, bits, "amax")
    return maxima_B


@share_maxima.register_fast("triton")
def share_maxima_triton(share: Tensor, begin: int, places: Places, dtype: torch.dtype) -> Tensor:
    from moefold.kernels.quantise import quantise_weight_share_triton as launch

    maxima_B = no_maxima(share, places)
    for place in places:
        launch.launch_share_maxima(share, begin, place, dtype, maxima_B)
    return maxima_B


@register_inner_op
def cast_share(
    share: Tensor, begin: int, places: Places, scales_B: Tensor, rule: ScaleRule, dtype: torch.dtype
) -> Tensor:
    """Bytes of a share, with a scale for each block; zeros between the matrices."""
    values = torch.zeros_like(share, dtype=rule.format.dtype)
    for place in places:
        part = held_part(place, begin, len(share))
        held = share[part.window]
        rounded = as_in_model(held, dtype)
        block = block_of_elements(part, share.device)
        scale = scales_B[block]
        quantised = round_to_fp8(rounded, scale, rule.format)
        values[part.window] = quantised
    return values


@cast_share.register_fast("triton")
def cast_share_triton(
    share: Tensor, begin: int, places: Places, scales_B: Tensor, rule: ScaleRule, dtype: torch.dtype
) -> Tensor:
    from moefold.kernels.quantise import quantise_weight_share_triton as launch

    values = torch.zeros_like(share, dtype=rule.format.dtype)
    for place in places:
        launch.launch_cast_share(share, begin, place, scales_B, rule, dtype, values)
    return values


@register_inner_op
def transpose_values(values_END: Tensor) -> Tensor:
    """Bytes of matrices in the layout (E, D, N)."""
    return values_END.mT.contiguous()


@transpose_values.register_fast("triton")
def transpose_values_triton(values_END: Tensor) -> Tensor:
    from moefold.kernels.quantise import quantise_weight_share_triton as launch

    return launch.launch_transpose(values_END)


def no_maxima(share: Tensor, places: Places) -> Tensor:
    """Zeros, (B,): nothing was found yet."""
    blocks = sum(place.blocks for place in places)
    return share.new_zeros(blocks, dtype=torch.int32)


class HeldPart(NamedTuple):
    """What a share holds of matrices: elements first..last of the matrices, `window` in the share."""

    place: MatrixPlace
    first: int
    last: int
    window: slice


def held_part(place: MatrixPlace, begin: int, size: int) -> HeldPart:
    first, last = place.within(begin, size)
    offset = place.start - begin
    first_in_share = offset + first
    last_in_share = offset + last
    window = slice(first_in_share, last_in_share)
    return HeldPart(place, first, last, window)


def as_in_model(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that a model of this dtype would have, in fp32."""
    wide = values.float()
    rounded = round_to_nearest(wide, dtype)
    return rounded.float()


def block_of_elements(part: HeldPart, device: torch.device) -> Tensor:
    """The number of the block of each element."""
    place = part.place
    _, n, d = place.shape
    _, blocks_down, blocks_across = place.block_shape
    element = torch.arange(part.first, part.last, device=device)
    # which row of blocks
    line = element // d
    matrix = line // n
    output = line % n
    down = matrix * blocks_down + output // BLOCK
    # which block of the row
    input = element % d
    across = input // BLOCK
    return place.first_block + down * blocks_across + across


CASE_PLACES = (
    MatrixPlace(0, (2, 136, 40), 0),
    MatrixPlace(10_880, (1, 24, 300), 4),
)
CASE_DTYPES = (torch.float32, torch.bfloat16)
CASE_SHARES = {  # first element and size
    "all": (0, 18_176),
    "a cut within a block": (5_000, 7_000),
    "the second weight alone": (10_880, 7_296),
    "within one row": (11_000, 128),
}


@share_maxima.register_cases
def share_maxima_cases(draw: CaseInputs) -> Cases:
    for name, (begin, size) in CASE_SHARES.items():
        share = draw.wide(size, scale=0.02)
        for dtype in CASE_DTYPES:
            inputs = (share, begin, CASE_PLACES, dtype)
            yield KernelCase(f"{name}, {dtype}", inputs)


@cast_share.register_cases
def cast_share_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, (begin, size) in CASE_SHARES.items():
        share = draw.wide(size, scale=0.02)
        for dtype in CASE_DTYPES:
            bits_B = share_maxima(share, begin, CASE_PLACES, dtype)
            maxima_B = bits_B.view(torch.float32)
            scales_B = scale_from_amax(maxima_B, rule)
            inputs = (share, begin, CASE_PLACES, scales_B, rule, dtype)
            yield KernelCase(f"{name}, {dtype}", inputs)


CASE_SHAPES = [  # E, N, D
    (2, 136, 40),
    (1, 24, 300),
    (1, 256, 128),
]


@transpose_values.register_cases
def transpose_values_cases(draw: CaseInputs) -> Cases:
    for shape in CASE_SHAPES:
        size = prod(shape)
        elements = torch.arange(size, device=draw.device)
        numbers = elements % 251
        values = numbers.to(torch.uint8)
        values = values.view(shape)
        yield KernelCase(f"{shape}", (values,))
