"""The random Hadamard transform."""

from __future__ import annotations

import torch

from moefold.kernels.quantise.hadamard import SIGNS, random_hadamard


def matrix() -> torch.Tensor:
    """diag(signs) H / 4 by Sylvester's rule: an entry is negative if its row and column share an odd number of bits."""
    entries = [[SIGNS[i] * (-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)]
    return torch.tensor(entries, dtype=torch.float64)


def test_it_is_the_product_with_the_matrix():
    x = torch.randn(3, 5, 48)
    expected = (x.double().view(-1, 16) @ matrix()).view(x.shape)
    assert torch.allclose(random_hadamard(x).double(), expected, rtol=0, atol=1e-6)
    whole = torch.randint(-8, 8, (7, 32)).bfloat16()
    assert torch.equal(random_hadamard(whole).double(), (whole.double().view(-1, 16) @ matrix()).view(whole.shape))


def test_it_leaves_a_product_of_two_operands_as_it_was():
    dy, x = torch.randint(-8, 8, (2, 24, 64)).float()  # sums of these are exact
    assert torch.equal(random_hadamard(dy) @ random_hadamard(x).T, dy @ x.T)


def test_an_outlier_is_spread_over_its_block():
    x = torch.zeros(32)
    x[3] = 16.0
    assert random_hadamard(x).abs().tolist() == [4.0] * 16 + [0.0] * 16
