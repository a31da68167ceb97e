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


class MicroSource(NamedTuple):
    """Rows (R, D) or transposed blocks of rows (B, D, K) to be quantised. `expert`: of each row or block. `random`:
    numbers of 32 bits for stochastic rounding, one for each value; None rounds to nearest."""

    values: Tensor
    expert: Tensor
    experts: int
    random: Tensor | None

    def largest_of_experts(self) -> Tensor:
        """The largest magnitude of each expert, (E,)."""
        every_dim = range(self.values.dim())
        inner_dims = tuple(every_dim[1:])
        amax = largest_magnitude(self.values, inner_dims)
        return largest_by_expert(amax, self.expert, self.experts)


class MicroFormat(Protocol):
    block: int
    rounds_stochastically: bool

    def rows(self, source: MicroSource) -> MicroMatrix:
        """Blocks along each row. `encode`: (R, 1)."""
        ...

    def columns(self, source: MicroSource) -> MicroMatrix:
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

    def rows(self, source: MicroSource) -> MicroMatrix:
        padded = pad_width(source.values, self.block)
        return self.quantise(padded)

    def columns(self, source: MicroSource) -> MicroMatrix:
        return self.quantise(source.values)

    def weight(self, w: Tensor) -> MicroMatrix:
        padded = pad_width(w, self.block)
        if not self.has_squares:
            return self.quantise(padded)
        padded = pad_height(padded, self.block)
        values, scales = quantise_mxfp8_squares(padded, self.rounding)
        return MicroMatrix(values, scales)

    def quantise(self, x: Tensor) -> MicroMatrix:
        """Blocks along the last dim."""
        values, scales = quantise_mxfp8(x, self.rounding)
        return MicroMatrix(values, scales)

    def exact_values(self, matrix: MicroMatrix) -> Tensor:
        values, scales, _ = matrix
        quantised = Quantised(values, scales)
        return dequantise_mxfp8(quantised)


class Nvfp4Format:
    """The fp32 scale is that of a matrix: of a dense layer's rows, of the rows of an expert, of a weight. Column copies
    are transformed first, so that their largest magnitudes are those behind the transform."""

    block = NV_BLOCK

    def __init__(self, options: PrecisionConfig):
        self.rounds_stochastically = options.stochastic
        self.transforms = options.hadamard
        self.has_squares = squares_in_use("nvfp4", options.weight_blocks)

    def rows(self, source: MicroSource) -> MicroMatrix:
        amax_E = source.largest_of_experts()
        padded_amax_E = pad(amax_E, (0, 1))  # of rows without an expert: zero
        amax_R = padded_amax_E[source.expert]
        amax_R1 = amax_R[:, None]
        padded_RD = pad_width(source.values, self.block)
        quantised = quantise_nvfp4(padded_RD, amax_R1, source.random)
        return MicroMatrix(*quantised)

    def columns(self, source: MicroSource) -> MicroMatrix:
        if self.transforms:
            transformed = random_hadamard(source.values)
            source = source._replace(values=transformed)
        amax_E = source.largest_of_experts()
        amax_E11 = amax_E[:, None, None]
        amax_B11 = amax_E11[source.expert]
        quantised = quantise_nvfp4(source.values, amax_B11, source.random)
        packed, scales, _ = quantised
        encode_E11 = encode_scale(amax_E11)
        return MicroMatrix(packed, scales, encode_E11)

    def weight(self, w: Tensor) -> MicroMatrix:
        padded = pad_width(w, self.block)
        if self.has_squares:
            padded = pad_height(padded, self.block)
            quantised = quantise_nvfp4_squares(padded)
        else:
            amax = largest_magnitude(w, (-2, -1))
            amax_11 = amax[..., None, None]
            quantised = quantise_nvfp4(padded, amax_11)
        return MicroMatrix(*quantised)

    def exact_values(self, matrix: MicroMatrix) -> Tensor:
        values, scales, encode = matrix
        assert encode is not None, "NVFP4 has an fp32 scale"
        quantised = Nvfp4(values, scales, encode)
        return unscaled_nvfp4(quantised)


def pad_width(x: Tensor, block: int) -> Tensor:
    """Zeros behind each row, up to a multiple of a block."""
    width = x.shape[-1]
    missing = -width % block
    return pad(x, (0, missing))


def pad_height(w: Tensor, block: int) -> Tensor:
    """Rows of zeros behind the last, up to a multiple of a block."""
    height = w.shape[-2]
    missing = -height % block
    return pad(w, (0, 0, 0, missing))


MICRO_FORMATS = {"mxfp8": Mxfp8, "nvfp4": Nvfp4Format}


def decode_factor(encode: Tensor | None, device: torch.device) -> Tensor:
    """What finished sums are multiplied by for one operand."""
    if encode is None:
        return torch.ones((), device=device)
    return encode.reciprocal()
