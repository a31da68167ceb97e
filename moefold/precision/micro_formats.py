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
from moefold.kernels.bound import BoundKernels
from moefold.kernels.quantise.hadamard_blocks import hadamard_blocks
from moefold.kernels.quantise.line_maxima import line_maxima
from moefold.kernels.quantise.mx_blocks import dequantise_mx, quantise_mx
from moefold.kernels.quantise.mxfp8 import ScaleRounding
from moefold.kernels.quantise.nv_blocks import dequantise_nv, quantise_nv, round_nv
from moefold.kernels.quantise.nvfp4 import encode_scale
from moefold.kernels.quantise.row_blocks import largest_by_expert, rows_to_blocks
from moefold.layout.counter_random import RandomCounters


class MicroMatrix(NamedTuple):
    """Values with the scales of their blocks; `scales` None: these are applied. `encode`: by what all values were
    multiplied; None: by nothing."""

    values: Tensor
    scales: Tensor | None
    encode: Tensor | None = None

    @property
    def block_scales(self) -> Tensor:
        assert self.scales is not None, "the scales of this operand are applied"
        return self.scales


class MicroSource(NamedTuple):
    """Rows (R, D) to be quantised along rows, or along columns in blocks of K from the places `source_P`, -1 for none.
    `expert`: of each row or block. `random`: counters of stochastic rounding; None rounds to nearest."""

    values: Tensor
    expert: Tensor
    experts: int
    random: RandomCounters | None
    source_P: Tensor | None = None


class MicroFormat(Protocol):
    block: int
    rounds_stochastically: bool

    def rows(self, source: MicroSource) -> MicroMatrix:
        """Blocks along each row, for the product that comes next. `encode`: (R, 1)."""
        ...

    def columns(self, source: MicroSource) -> MicroMatrix:
        """Blocks of rows, transposed. `encode`: (E, 1, 1)."""
        ...

    def weight(self, w: Tensor) -> MicroMatrix:
        """Blocks along the last dim, or squares. `encode`: (..., 1, 1)."""
        ...

    def exact_values(self, matrix: MicroMatrix, dtype: torch.dtype, transposed: bool = False) -> Tensor:
        """fp32 or bf16; times 1 / `encode` they are about what was quantised. `transposed`: they will be read so."""
        ...


class Mxfp8:
    block = MX_BLOCK
    rounds_stochastically = False

    def __init__(self, options: PrecisionConfig, kernels: BoundKernels):
        self.quantise_blocks = kernels[quantise_mx]
        self.dequantise = kernels[dequantise_mx]
        self.rounding: ScaleRounding = options.scale_rounding
        self.has_squares = squares_in_use("mxfp8", options.weight_blocks)

    def rows(self, source: MicroSource) -> MicroMatrix:
        padded = pad_width(source.values, self.block)
        return MicroMatrix(*self.quantise_blocks(padded, self.rounding))

    def columns(self, source: MicroSource) -> MicroMatrix:
        return MicroMatrix(*self.quantise_blocks(source.values, self.rounding, False, source.source_P))

    def weight(self, w: Tensor) -> MicroMatrix:
        padded = pad_width(w, self.block)
        if self.has_squares:
            padded = pad_height(padded, self.block)
        return MicroMatrix(*self.quantise_blocks(padded, self.rounding, self.has_squares))

    def exact_values(self, matrix: MicroMatrix, dtype: torch.dtype, transposed: bool = False) -> Tensor:
        return self.dequantise(matrix.values, matrix.block_scales, dtype, transposed)


class Nvfp4Format:
    """The fp32 scale is that of a matrix: of a dense layer's rows, of the rows of an expert, of a weight. Column copies
    are transformed first, so that their largest magnitudes are those behind the transform."""

    block = NV_BLOCK

    def __init__(self, options: PrecisionConfig, kernels: BoundKernels):
        self.is_emulated = not kernels.facts.multiplies_micro_formats
        self.quantise = kernels[quantise_nv]
        self.round = kernels[round_nv]
        self.dequantise = kernels[dequantise_nv]
        self.transform = kernels[hadamard_blocks]
        self.line_maxima = kernels[line_maxima]
        self.rounds_stochastically = options.stochastic
        self.transforms = options.hadamard
        self.has_squares = squares_in_use("nvfp4", options.weight_blocks)

    def rows(self, source: MicroSource) -> MicroMatrix:
        amax_R = self.line_maxima(source.values)
        amax_E = largest_by_expert(amax_R, source.expert, source.experts)
        padded_amax_E = pad(amax_E, (0, 1))  # of rows without an expert: zero
        amax_R = padded_amax_E[source.expert]
        amax_R1 = amax_R[:, None]
        padded_RD = pad_width(source.values, self.block)
        if self.is_emulated:
            dtype = exact_dtype(padded_RD)
            values_RD = self.round(padded_RD, amax_R1, dtype, source.random)
            return MicroMatrix(values_RD, None, encode_scale(amax_R1))
        quantised = self.quantise(padded_RD, amax_R1, source.random)
        return MicroMatrix(*quantised)

    def columns(self, source: MicroSource) -> MicroMatrix:
        places_P = source.source_P
        assert places_P is not None, "a column copy is made of blocks of rows"
        if self.transforms:
            x_BDK, amax_B = self.transform(source.values, places_P)
        else:
            x_BDK = rows_to_blocks(source.values, places_P, self.block)
            lines = without_gaps(x_BDK).flatten(1)
            amax_B = self.line_maxima(lines)
        amax_E = largest_by_expert(amax_B, source.expert, source.experts)
        amax_E11 = amax_E[:, None, None]
        amax_B11 = amax_E11[source.expert]
        quantised = self.quantise(x_BDK, amax_B11, source.random)
        packed, scales, _ = quantised
        encode_E11 = encode_scale(amax_E11)
        return MicroMatrix(packed, scales, encode_E11)

    def weight(self, w: Tensor) -> MicroMatrix:
        padded = pad_width(w, self.block)
        if self.has_squares:
            padded = pad_height(padded, self.block)
        amax_11 = self.largest_of_matrices(w)
        return MicroMatrix(*self.quantise(padded, amax_11, None, self.has_squares))

    def largest_of_matrices(self, w: Tensor) -> Tensor:
        """(..., 1, 1)."""
        matrices = without_gaps(w)
        flat = matrices.flatten(0, -2)
        amax = self.line_maxima(flat)
        of_lines = amax.view(*matrices.shape[:-1], 1)
        return of_lines.amax(-2, keepdim=True)

    def exact_values(self, matrix: MicroMatrix, dtype: torch.dtype, transposed: bool = False) -> Tensor:
        if matrix.scales is None:
            return matrix.values
        return self.dequantise(matrix.values, matrix.scales, dtype, transposed)


def exact_dtype(x: Tensor) -> torch.dtype:
    """The type in which emulated products multiply."""
    return torch.bfloat16 if x.is_cuda else torch.float32


def without_gaps(x: Tensor) -> Tensor:
    """Matrices as they lie in memory, transposed or not, or a copy of them."""
    transposed = x.mT
    if transposed.is_contiguous():
        return transposed
    return x.contiguous()


def pad_width(x: Tensor, block: int) -> Tensor:
    """Zeros behind each row, up to a multiple of a block."""
    width = x.shape[-1]
    missing = -width % block
    return pad(x, (0, missing)) if missing else x  # no padding is a copy too


def pad_height(w: Tensor, block: int) -> Tensor:
    """Rows of zeros behind the last, up to a multiple of a block."""
    height = w.shape[-2]
    missing = -height % block
    return pad(w, (0, 0, 0, missing)) if missing else w


MICRO_FORMATS = {"mxfp8": Mxfp8, "nvfp4": Nvfp4Format}


def decode_factor(encode: Tensor | None, device: torch.device) -> Tensor:
    """What finished sums are multiplied by for one operand."""
    if encode is None:
        return torch.ones((), device=device)
    return encode.reciprocal()
