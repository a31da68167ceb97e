"""Lines of finished sums, each times a number in fp32: the scale of the matrices whose product they are."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def scale_lines(x_LN: Tensor, factor_L: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded once, to `dtype`."""
    scaled_LN = x_LN * factor_L[:, None]
    return scaled_LN.to(dtype)


@scale_lines.register_fast("triton")
def scale_lines_triton(x_LN: Tensor, factor_L: Tensor, dtype: torch.dtype) -> Tensor:
    from moefold.kernels.quantise.scale_lines_triton import launch_scale_lines

    return launch_scale_lines(x_LN, factor_L, dtype)


@scale_lines.register_cases
def scale_lines_cases(draw: CaseInputs) -> Cases:
    for lines, width in ((5, 48), (3, 5000), (0, 16), (2, 0)):
        x_LN = draw.normal(lines, width)
        wide = torch.promote_types(x_LN.dtype, torch.float32)
        factor_L = draw.normal(lines, seed=1).to(wide)
        yield KernelCase(f"{lines} lines of {width}", (x_LN, factor_L, x_LN.dtype))
