"""Implementations of quantisation. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import Choices

CHOICES: Choices = {
    "tile_maxima": (),
    "quantise_tiles": (),
    "quantise_weight": (),
}
