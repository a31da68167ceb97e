"""Router jitter: multiplicative noise on the router's input. The noise is a function of the token's number in the run,
the layer and the dim (layout/counter_random.py). T tokens, D width.
"""

from __future__ import annotations

from torch import Tensor

from moefold.layout.counter_random import uniform_noise


def multiply_by_jitter(h_TD: Tensor, size: float, number_T: Tensor, layer: int) -> Tensor:
    """h times factors that are uniform in [1 - size, 1 + size)."""
    width = h_TD.shape[1]
    noise_TD = uniform_noise(number_T, width, layer)
    factor_TD = 1 + size * noise_TD
    factor_TD = factor_TD.to(h_TD.dtype)
    return h_TD * factor_TD
