"""Noise on the router's input that depends on the token's number in the run, the layer and the dim, and on nothing
else: the same on any layout, in any microbatch, and when a forward is computed again.

T tokens, D width. A counter is scrambled by multiplications and shifts (the finaliser of a 64-bit hash).
"""

from __future__ import annotations

import torch

TWO_TO_64 = 1 << 64


def as_signed_int64(x: int) -> int:
    """The same 64 bits as a signed number, as torch has them."""
    return x - TWO_TO_64 if x >= TWO_TO_64 >> 1 else x


HASH_ROUNDS = ((30, as_signed_int64(0xBF58476D1CE4E5B9)), (27, as_signed_int64(0x94D049BB133111EB)), (31, 1))


def splitmix64_hash(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in HASH_ROUNDS:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def uniform_noise(number_T: torch.Tensor, width: int, layer: int) -> torch.Tensor:
    """(T, D), even in [-1, 1)."""
    token_T1 = splitmix64_hash(splitmix64_hash(number_T[:, None]) + layer + 1)
    bits_TD = splitmix64_hash(token_T1 + torch.arange(width, device=number_T.device))
    return (bits_TD >> 40).to(torch.float32) / (1 << 23)


def multiply_by_jitter(h_TD: torch.Tensor, size: float, number_T: torch.Tensor, layer: int) -> torch.Tensor:
    """h times something within 1 +- size."""
    return h_TD * (1 + size * uniform_noise(number_T, h_TD.shape[1], layer)).to(h_TD.dtype)
