"""The AdamW update that writes FP8 copies, in Triton. Imported only where Triton is.

One program takes 128 x 128 weights: it updates them, some rows at a time, then reads the updated block again, which is
in the cache, and writes it to both layouts.
"""

# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from moefold.kernels.optimizer.optimizer_triton import (
    is_finite,
    modes_of_state,
    numbers_of_options,
    update_elements,
    weight_bits,
)
from moefold.kernels.quantise.fp8 import BLOCK
from moefold.kernels.quantise.quantise_weight_triton import (
    ROOM,
    grid_of_blocks,
    load_block,
    round_to_bf16,
    store_quantised_block,
    wide_block,
)
from moefold.kernels.tile_triton import tile_mask, tile_offsets, wide_program_id

ROWS = 32  # of a block, updated at once: eight weights a thread


@triton.jit
def adamw_blocks_kernel(
    main,
    gradient,
    mean,
    square,
    weights,
    updated,
    scale,
    scalars,
    first,
    values_END,
    values_EDN,
    scales_EIJ,
    scales_EJI,
    N,
    D,
    beta1,
    beta2,
    eps,
    SPLIT: constexpr,
    COPY: constexpr,
    STOCHASTIC: constexpr,
    STOCHASTIC_MAIN: constexpr,
    ROUND: constexpr,
    LARGEST: constexpr,
    POWER_OF_TWO: constexpr,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    """`updated`: the tensor of new weights, `weights` as bf16 or `main`. ROUND: the model is bf16 and they are not."""
    factor = tl.load(scale).to(tl.float32)
    if is_finite(factor):
        e = wide_program_id(2)
        begin = wide_program_id(1) * BLOCK
        d = wide_block(0, BLOCK)
        # the update
        for row in tl.static_range(0, BLOCK, ROWS):
            n = begin + row + tl.arange(0, ROWS)
            i = e * N * D + tile_offsets(n, d, D)
            there = tile_mask(n < N, d < D)
            update_elements(
                main,
                gradient,
                mean,
                square,
                weights,
                factor,
                scalars,
                i,
                there,
                first,
                beta1,
                beta2,
                eps,
                SPLIT,
                COPY,
                STOCHASTIC,
                STOCHASTIC_MAIN,
            )
        tl.debug_barrier()  # threads read what others have stored
        # the copies
        w = load_block(updated, N, D, BLOCK)
        if ROUND:
            w = round_to_bf16(w)
        store_quantised_block(w, values_END, values_EDN, scales_EIJ, scales_EJI, N, D, LARGEST, POWER_OF_TWO, BLOCK)


def launch_adamw_blocks(
    main, g, m, v, weights, scale, scalars, options, first, values_END, values_EDN, scales_EIJ, scales_EJI, rule, dtype
) -> None:
    """See adamw_blocks.py."""
    _, n, d = values_END.shape
    updated = main if weights is None else weights
    state = (main, g, m, v, weight_bits(main, weights), updated)
    copies = (values_END, values_EDN, scales_EIJ, scales_EJI)
    rounds = (updated.dtype, dtype) == (torch.float32, torch.bfloat16)
    modes = modes_of_state(main, weights, options) | {"ROUND": rounds}
    constants = {"LARGEST": rule.format.largest, "POWER_OF_TWO": rule.power_of_two, "ROWS": ROWS, "BLOCK": BLOCK}
    adamw_blocks_kernel[grid_of_blocks(values_END)](
        *state, scale, scalars, first, *copies, n, d, *numbers_of_options(options), **modes, **constants, **ROOM
    )
