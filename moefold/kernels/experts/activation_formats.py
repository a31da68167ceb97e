"""Number formats of the experts' activations in FP8: that of the activation, and that of the kept pre-activation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moefold.kernels.quantise.fp8 import ScaleRule


class ActivationFormats(NamedTuple):
    """`fp8_activation`: a is quantised by blocks in the epilogue; otherwise its scale is wider than a tile, and a is
    quantised later. `fp8_kept`: h is kept in FP8."""

    rule: ScaleRule
    fp8_activation: bool
    fp8_kept: bool
    dtype: torch.dtype  # the model's own
