"""Grouped products by torch: long sums on a CPU."""

from __future__ import annotations

import torch

from moefold.kernels.experts.grouped_gemm import LONGEST_SUM, PART_OF_SUM, grouped_gemm_torch


def test_a_large_summand_swallows_small_ones_of_its_own_part_alone():
    width = 14 * PART_OF_SUM
    assert width > LONGEST_SUM
    rows = 48  # one sum over all of the width loses every one of these ones
    x_RD = torch.ones(rows, width)
    x_RD[:, 0] = 2.0**24
    w_END = torch.ones(1, 32, width)
    ends_E = torch.tensor([rows], dtype=torch.int32)
    lost_RN = 2.0**24 + width - 1 - grouped_gemm_torch(x_RD, w_END, ends_E).double()
    assert lost_RN.max() <= PART_OF_SUM


def test_gradients_of_a_long_sum_are_those_of_plain_products():
    x_RD = torch.randn(6, LONGEST_SUM + PART_OF_SUM, requires_grad=True)
    w_END = torch.randn(2, 8, LONGEST_SUM + PART_OF_SUM, requires_grad=True)
    ends_E = torch.tensor([2, 6], dtype=torch.int32)
    dy_RN = torch.randn(6, 8)
    found = torch.autograd.grad(grouped_gemm_torch(x_RD, w_END, ends_E), (x_RD, w_END), dy_RN)
    plain = torch.cat([x_RD[:2] @ w_END[0].T, x_RD[2:] @ w_END[1].T])
    for mine, expected in zip(found, torch.autograd.grad(plain, (x_RD, w_END), dy_RN), strict=True):
        torch.testing.assert_close(mine, expected)
