"""Noise on the router's input that depends on the token's number in the run, the layer and the dim, and on nothing
else: the same on any layout, in any microbatch, and when a forward is computed again.

T tokens, D width. A counter is scrambled by multiplications and shifts (the finaliser of a 64-bit hash).
"""

from __future__ import annotations

import torch

SIGNED = 1 << 64


def signed(x: int) -> int:
    """The same 64 bits as a signed number, as torch has them."""
    return x - SIGNED if x >= SIGNED >> 1 else x


ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)), (31, 1))


def scrambled(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in ROUNDS:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def noise(number_T: torch.Tensor, width: int, layer: int) -> torch.Tensor:
    """(T, D), even in [-1, 1)."""
    token_T1 = scrambled(scrambled(number_T[:, None]) + layer + 1)
    bits_TD = scrambled(token_T1 + torch.arange(width, device=number_T.device))
    return (bits_TD >> 40).to(torch.float32) / (1 << 23)


def jittered(h_TD: torch.Tensor, size: float, number_T: torch.Tensor, layer: int) -> torch.Tensor:
    """h times something within 1 +- size."""
    return h_TD * (1 + size * noise(number_T, h_TD.shape[1], layer)).to(h_TD.dtype)
