"""The Gluon kernels that quantise rows in tiles, for the launches of quantise_tiles_triton.py.

Imported only where Triton is.
"""

from __future__ import annotations

from moefold.kernels.quantise.quantise_tiles_hopper import quantise_tiles_kernel, tile_maxima_kernel
from moefold.kernels.quantise.quantise_tiles_triton import TileKernels

GLUON_KERNELS = TileKernels(quantise_tiles_kernel, tile_maxima_kernel, {"num_warps": 8})  # as the layout of a tile asks
