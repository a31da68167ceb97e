"""Products of MXFP8 and NVFP4, emulated: what the operands stand for is multiplied, in fp32 on a CPU and in bf16, which
holds it exactly, on a GPU.

R rows, P padded rows in B blocks of K, D inputs, N outputs, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.quantise.row_blocks import blocks_to_rows, expert_of_rows
from moefold.kernels.quantise.scale_lines import scale_lines
from moefold.precision.micro_formats import MicroFormat, MicroMatrix, decode_factor, exact_dtype


class MicroOperand(NamedTuple):
    """Rows of an input or a gradient. `padded_ends_E`: where each expert's rows end in the column copy."""

    ends_E: Tensor
    padded_ends_E: Tensor
    rows: MicroMatrix | None
    columns: MicroMatrix

    def along_columns(self) -> MicroOperand:
        return self._replace(rows=None)


class WeightMatrix(NamedTuple):
    """A matrix, or one for each expert, of so many rows and columns; the values may be padded."""

    matrix: MicroMatrix
    rows: int
    columns: int


class MicroWeight(NamedTuple):
    """Copies of a weight (N, D) or (E, N, D) along D, and of its transpose along N."""

    forward: WeightMatrix
    transposed: WeightMatrix


class MicroProducts:
    """The products of operands in a micro format. The scale of a whole matrix is applied to finished sums."""

    def __init__(self, format: MicroFormat, kernels: BoundKernels):
        self.format = format
        self.multiply_rows = kernels[grouped_gemm]
        self.multiply_columns = kernels[grouped_gemm_weight]
        self.scale_lines = kernels[scale_lines]

    def forward(self, x: MicroOperand, w: MicroWeight, bias: Tensor | None) -> Tensor:
        y_RN = self.product(x, w.forward)
        if bias is None:
            return y_RN
        bias_N = bias.to(y_RN.dtype)
        return y_RN + bias_N

    def data(self, dy: MicroOperand, w: MicroWeight, into: Tensor | None) -> Tensor:
        dx_RD = self.product(dy, w.transposed)
        if into is None:
            return dx_RD
        return into.add_(dx_RD)

    def product(self, a: MicroOperand, b: WeightMatrix) -> Tensor:
        rows = a.rows
        assert rows is not None, "an operand of the weight gradient alone"
        padded_a = self.values(rows)
        padded_b = self.values(b.matrix)
        a_RK = padded_a[:, : b.columns]
        b_NK = padded_b[..., : b.rows, : b.columns]
        if b_NK.dim() == 2:
            y_RN = a_RK @ b_NK.T
        else:
            left = a_RK.contiguous()
            right = b_NK.contiguous()
            y_RN = self.multiply_rows(left, right, a.ends_E)
        return self.scaled_rows(y_RN, a, b)

    def weight(self, dy: MicroOperand, x: MicroOperand, weight: Tensor) -> Tensor | None:
        dy_PN = self.padded_rows(dy)
        x_PD = self.padded_rows(x)
        if weight.dim() == 2:
            product = dy_PN.T @ x_PD
            dw_END = product[None]
        else:
            left = dy_PN.contiguous()
            right = x_PD.contiguous()
            dw_END = self.multiply_columns(left, right, x.padded_ends_E)
        return self.scaled_gradient(dw_END, dy.columns, x.columns, weight)

    def padded_rows(self, operand: MicroOperand) -> Tensor:
        """Rows of the column copy."""
        values_BDK = self.values(operand.columns, transposed=True)
        return blocks_to_rows(values_BDK)

    def values(self, matrix: MicroMatrix, transposed: bool = False) -> Tensor:
        dtype = exact_dtype(matrix.values)
        return self.format.exact_values(matrix, dtype, transposed)

    def scaled_rows(self, y_RN: Tensor, a: MicroOperand, b: WeightMatrix) -> Tensor:
        """Finished sums times the scales of whole matrices, in the type of the sums."""
        assert a.rows is not None, "an operand of the weight gradient alone"
        if a.rows.encode is None:  # then the weight has none either
            return y_RN
        device = y_RN.device
        of_rows = decode_factor(a.rows.encode, device)
        of_weight = decode_factor(b.matrix.encode, device)
        if b.matrix.values.dim() == 3:
            expert_R = expert_of_rows(a.ends_E, len(y_RN))
            of_weight = factor_of_experts(of_weight, expert_R)
        factor_R1 = of_rows * of_weight
        return self.scale_lines(y_RN, factor_R1.flatten(), y_RN.dtype)

    def scaled_gradient(self, dw_END: Tensor, dy: MicroMatrix, x: MicroMatrix, weight: Tensor) -> Tensor:
        """Finished sums times the scales of whole matrices, as the gradient of `weight`."""
        if dy.encode is None or x.encode is None:
            return dw_END.view(weight.shape).to(weight.dtype)
        of_dy = decode_factor(dy.encode, dw_END.device)
        of_x = decode_factor(x.encode, dw_END.device)
        factor_E = (of_dy * of_x).flatten()
        lines = dw_END.flatten(1)
        scaled = self.scale_lines(lines, factor_E, weight.dtype)
        return scaled.view(weight.shape)


def factor_of_experts(factor: Tensor, expert_R: Tensor) -> Tensor:
    """The factor of each row's expert, (R, 1); 1 for a row without an expert, or where all have the same."""
    if factor.dim() == 0:
        return factor
    factor_E = factor.flatten()
    padded_E = pad(factor_E, (0, 1), value=1.0)
    factor_R = padded_E[expert_R]
    return factor_R[:, None]
