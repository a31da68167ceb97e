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

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule, round_to_fp8, scale_from_amax
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

MAGNITUDE_BITS = 0x7FFFFFFF  # all bits of an fp32 number but its sign


class MatrixPlace(NamedTuple):
    """Matrices (E, N, D) in a flat tensor, from element `start` on; their blocks are numbered from `first_block` on."""

    start: int
    shape: tuple[int, int, int]
    first_block: int

    @property
    def stop(self) -> int:
        experts, n, d = self.shape
        return self.start + experts * n * d

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """(E, I, J)."""
        experts, n, d = self.shape
        return experts, -(-n // BLOCK), -(-d // BLOCK)

    @property
    def blocks(self) -> int:
        experts, i, j = self.block_shape
        return experts * i * j

    def within(self, begin: int, size: int) -> tuple[int, int]:
        """The elements of these matrices in a share of `size` elements from `begin` on, counted from `start`: first
        and last."""
        first = max(self.start, begin)
        last = min(self.stop, begin + size)
        return first - self.start, max(first, last) - self.start


Places = tuple[MatrixPlace, ...]


@register_inner_op
def share_maxima(share: Tensor, begin: int, places: Places, dtype: torch.dtype) -> Tensor:
    """Bits of the largest magnitude of each block, (B,) of int32: they have the order of the magnitudes, NaN above
    infinity, and 0 where the share holds nothing of the block. `begin`: the share's place in the flat tensor."""
    maxima_B = share.new_zeros(count_blocks(places), dtype=torch.int32)
    for place in places:
        first, last = place.within(begin, len(share))
        values = part_of_share(share, begin, place, dtype)
        bits = values.view(torch.int32) & MAGNITUDE_BITS
        block = block_of_elements(place, first, last, share.device)
        maxima_B.scatter_reduce_(0, block, bits, "amax")
    return maxima_B


@share_maxima.register_fast("triton")
def share_maxima_triton(share: Tensor, begin: int, places: Places, dtype: torch.dtype) -> Tensor:
    from moefold.kernels.quantise import quantise_weight_share_triton as launch

    maxima_B = share.new_zeros(count_blocks(places), dtype=torch.int32)
    for place in places:
        launch.launch_share_maxima(share, begin, place, dtype, maxima_B)
    return maxima_B


@register_inner_op
def cast_share(
    share: Tensor, begin: int, places: Places, scales_B: Tensor, rule: ScaleRule, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Bytes of a share, with a scale for each block; zeros between the matrices."""
    values = torch.zeros_like(share, dtype=rule.format.dtype)
    for place in places:
        first, last = place.within(begin, len(share))
        part = part_of_share(share, begin, place, dtype)
        scale = scales_B[block_of_elements(place, first, last, share.device)]
        window = window_of_share(begin, place, first, last)
        values[window] = round_to_fp8(part, scale, rule.format)
    return values


@cast_share.register_fast("triton")
def cast_share_triton(
    share: Tensor, begin: int, places: Places, scales_B: Tensor, rule: ScaleRule, dtype: torch.dtype
) -> Tensor:  # fmt: skip
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


def count_blocks(places: Places) -> int:
    return sum(place.blocks for place in places)


def window_of_share(begin: int, place: MatrixPlace, first: int, last: int) -> slice:
    """Elements first..last of these matrices in the share."""
    offset = place.start - begin
    return slice(offset + first, offset + last)


def part_of_share(share: Tensor, begin: int, place: MatrixPlace, dtype: torch.dtype) -> Tensor:
    """The values that the share holds of these matrices, as the model would have them, in fp32."""
    first, last = place.within(begin, len(share))
    window = window_of_share(begin, place, first, last)
    rounded = round_to_nearest(share[window].float(), dtype)
    return rounded.float()


def block_of_elements(place: MatrixPlace, first: int, last: int, device: torch.device) -> Tensor:
    """The number of the block of each element first..last of these matrices."""
    _, n, d = place.shape
    _, blocks_down, blocks_across = place.block_shape
    element = torch.arange(first, last, device=device)
    line = element // d
    down = line // n * blocks_down + line % n // BLOCK
    across = element % d // BLOCK
    return place.first_block + down * blocks_across + across


CASE_PLACES = (MatrixPlace(0, (2, 136, 40), 0), MatrixPlace(10_880, (1, 24, 300), 4))
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
        for dtype in (torch.float32, torch.bfloat16):
            yield KernelCase(f"{name}, {dtype}", (share, begin, CASE_PLACES, dtype))


@cast_share.register_cases
def cast_share_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, (begin, size) in CASE_SHARES.items():
        share = draw.wide(size, scale=0.02)
        for dtype in (torch.float32, torch.bfloat16):
            maxima_B = share_maxima(share, begin, CASE_PLACES, dtype)
            scales_B = scale_from_amax(maxima_B.view(torch.float32), rule)
            yield KernelCase(f"{name}, {dtype}", (share, begin, CASE_PLACES, scales_B, rule, dtype))


@transpose_values.register_cases
def transpose_values_cases(draw: CaseInputs) -> Cases:
    for shape in ((2, 136, 40), (1, 24, 300), (1, 256, 128)):
        experts, n, d = shape
        numbers = torch.arange(experts * n * d, device=draw.device) % 251
        yield KernelCase(f"{shape}", (numbers.to(torch.uint8).view(shape),))
