"""Router jitter: multiplicative noise on the router's input, from a counter-based generator (splitmix64).

The noise is a function of the token's number in the run, the layer and the dim, and of nothing else: it is the same on
any layout, in any microbatch, and when a forward is recomputed. T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

TWO_TO_64 = 1 << 64


def as_signed_int64(x: int) -> int:
    """The same 64 bits as a signed number: torch has no unsigned arithmetic."""
    return x - TWO_TO_64 if x >= TWO_TO_64 >> 1 else x


HASH_ROUNDS = ((30, as_signed_int64(0xBF58476D1CE4E5B9)), (27, as_signed_int64(0x94D049BB133111EB)), (31, 1))


def splitmix64_hash(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, element by element."""
    for shift, factor in HASH_ROUNDS:
        low_bits = (1 << (64 - shift)) - 1  # masks the sign bits that torch's shift brings in
        x = (x ^ ((x >> shift) & low_bits)) * factor
    return x


def uniform_noise(number_T: Tensor, width: int, layer: int) -> Tensor:
    """(T, D), uniform in [-1, 1)."""
    number_T1 = number_T[:, None]
    token_T1 = splitmix64_hash(splitmix64_hash(number_T1) + layer + 1)
    dim_D = torch.arange(width, device=number_T.device)
    bits_TD = splitmix64_hash(token_T1 + dim_D)
    return (bits_TD >> 40).to(torch.float32) / (1 << 23)


def multiply_by_jitter(h_TD: Tensor, size: float, number_T: Tensor, layer: int) -> Tensor:
    """h times factors that are uniform in [1 - size, 1 + size)."""
    noise_TD = uniform_noise(number_T, h_TD.shape[1], layer)
    factor_TD = 1 + size * noise_TD
    return h_TD * factor_TD.to(h_TD.dtype)
