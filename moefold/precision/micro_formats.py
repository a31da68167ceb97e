"""MXFP8 and NVFP4 of matrices: rows along their width, columns in blocks of rows, weights. What is stored is what the
formats store; `exact_values` is what a product multiplies, exact in bf16.

R rows, D width, B blocks of K rows, E experts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefold.config.precision_recipes import MX_BLOCK, NV_BLOCK, squares_in_use
from moefold.config.run import PrecisionConfig
from moefold.kernels.quantise.fp8 import Quantised, largest_magnitude
from moefold.kernels.quantise.hadamard import random_hadamard
from moefold.kernels.quantise.mxfp8 import ScaleRounding, dequantise_mxfp8, quantise_mxfp8, quantise_mxfp8_squares
from moefold.kernels.quantise.nvfp4 import Nvfp4, encode_scale, quantise_nvfp4, quantise_nvfp4_squares, unscaled_nvfp4
from moefold.kernels.quantise.row_blocks import largest_by_expert


class MicroMatrix(NamedTuple):
    """Values with the scales of their blocks. `encode`: by what all values were multiplied; None: by nothing."""

    values: Tensor
    scales: Tensor
    encode: Tensor | None = None


class MicroFormat(Protocol):
    """`random`: numbers of 32 bits for stochastic rounding, one for each value; None rounds to nearest."""

    block: int
    rounds_stochastically: bool

    def rows(self, x_RD: Tensor, expert_R: Tensor, experts: int, random: Tensor | None) -> MicroMatrix:
        """Blocks along each row. `encode`: (R, 1)."""
        ...

    def columns(self, x_BDK: Tensor, expert_B: Tensor, experts: int, random: Tensor | None) -> MicroMatrix:
        """Blocks of rows, transposed. `encode`: (E, 1, 1)."""
        ...

    def weight(self, w: Tensor) -> MicroMatrix:
        """Blocks along the last dim, or squares. `encode`: (..., 1, 1)."""
        ...

    def exact_values(self, matrix: MicroMatrix) -> Tensor:
        """fp32; times 1 / `encode` they are about what was quantised."""
        ...


class Mxfp8:
    block = MX_BLOCK
    rounds_stochastically = False

    def __init__(self, options: PrecisionConfig):
        self.rounding: ScaleRounding = options.scale_rounding
        self.has_squares = squares_in_use("mxfp8", options.weight_blocks)

    def rows(self, x_RD: Tensor, expert_R: Tensor, experts: int, random: Tensor | None) -> MicroMatrix:
        padded = pad_width(x_RD, self.block)
        return MicroMatrix(*quantise_mxfp8(padded, self.rounding))

    def columns(self, x_BDK: Tensor, expert_B: Tensor, experts: int, random: Tensor | None) -> MicroMatrix:
        return MicroMatrix(*quantise_mxfp8(x_BDK, self.rounding))

    def weight(self, w: Tensor) -> MicroMatrix:
        if self.has_squares:
            return MicroMatrix(*quantise_mxfp8_squares(pad_both(w, self.block), self.rounding))
        return MicroMatrix(*quantise_mxfp8(pad_width(w, self.block), self.rounding))

    def exact_values(self, matrix: MicroMatrix) -> Tensor:
        return dequantise_mxfp8(Quantised(matrix.values, matrix.scales))


class Nvfp4Format:
    """The fp32 scale is that of a matrix: of a dense layer's rows, of the rows of an expert, of a weight. Column copies
    are transformed first, so that their largest magnitudes are those behind the transform."""

    block = NV_BLOCK

    def __init__(self, options: PrecisionConfig):
        self.rounds_stochastically = options.stochastic
        self.transforms = options.hadamard
        self.has_squares = squares_in_use("nvfp4", options.weight_blocks)

    def rows(self, x_RD: Tensor, expert_R: Tensor, experts: int, random: Tensor | None) -> MicroMatrix:
        amax_R = largest_magnitude(x_RD, 1)
        amax_E = largest_by_expert(amax_R, expert_R, experts)
        amax_R1 = pad(amax_E, (0, 1))[expert_R][:, None]
        return MicroMatrix(*quantise_nvfp4(pad_width(x_RD, self.block), amax_R1, random))

    def columns(self, x_BDK: Tensor, expert_B: Tensor, experts: int, random: Tensor | None) -> MicroMatrix:
        if self.transforms:
            x_BDK = random_hadamard(x_BDK)
        amax_B = largest_magnitude(x_BDK, (1, 2))
        amax_E = largest_by_expert(amax_B, expert_B, experts)
        amax_B11 = amax_E[expert_B][:, None, None]
        packed, scales, _ = quantise_nvfp4(x_BDK, amax_B11, random)
        encode_E = encode_scale(amax_E)
        return MicroMatrix(packed, scales, encode_E[:, None, None])

    def weight(self, w: Tensor) -> MicroMatrix:
        if self.has_squares:
            return MicroMatrix(*quantise_nvfp4_squares(pad_both(w, self.block)))
        amax = largest_magnitude(w, (-2, -1))[..., None, None]
        return MicroMatrix(*quantise_nvfp4(pad_width(w, self.block), amax))

    def exact_values(self, matrix: MicroMatrix) -> Tensor:
        assert matrix.encode is not None, "NVFP4 has an fp32 scale"
        return unscaled_nvfp4(Nvfp4(matrix.values, matrix.scales, matrix.encode))


def pad_width(x: Tensor, block: int) -> Tensor:
    return pad(x, (0, -x.shape[-1] % block))


def pad_both(w: Tensor, block: int) -> Tensor:
    return pad(w, (0, -w.shape[-1] % block, 0, -w.shape[-2] % block))


MICRO_FORMATS = {"mxfp8": Mxfp8, "nvfp4": Nvfp4Format}


def decode_factor(encode: Tensor | None, device: torch.device) -> Tensor:
    """What finished sums are multiplied by for one operand."""
    if encode is None:
        return torch.ones((), device=device)
    return encode.reciprocal()
