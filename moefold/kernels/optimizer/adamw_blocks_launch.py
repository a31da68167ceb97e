"""The AdamW update that writes FP8 copies, in two passes. Imported only where Triton is.

A kernel for both has not the registers for either's speed: on an H200 it takes 45 ms for 6.44 G weights, and 47 where
weights stay in registers between the two; the update and a second read take 35.5 ms.
"""

from __future__ import annotations

from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_blocks_triton import launch_adamw_blocks as launch_in_one_pass
from moefold.kernels.quantise.quantise_weight_launch import write_blocks


def launch_adamw_blocks(
    main, g, m, v, weights, scale, scalars, options, first, values_END, values_EDN, scales_EIJ, scales_EJI, rule, dtype
) -> None:
    """See adamw_blocks.py. Without weights beside the main weights nothing could be read again: one pass. Of a step
    that updates nothing the copies are made again from the same weights, with the same bits."""
    values = (values_END, values_EDN)
    scales = (scales_EIJ, scales_EJI)
    if weights is None:
        launch_in_one_pass(
            main, g, m, v, weights, scale, scalars, options, first, *values, *scales, rule, dtype
        )  # fmt: skip
        return
    update = adamw.implementations["triton"]
    update(main, g, m, v, weights, scale, scalars, options, first)
    w_END = weights.view(values_END.shape)
    write_blocks(w_END, values, scales, rule)
