"""The Gluon kernels that quantise rows in tiles, for the launches of quantise_tiles_triton.py and
delayed_tiles_triton.py.

Imported only where Triton is.
"""

from __future__ import annotations

from moefold.kernels.quantise.delayed_tiles_hopper import quantise_delayed_kernel
from moefold.kernels.quantise.delayed_tiles_triton import DelayedKernel
from moefold.kernels.quantise.quantise_tiles_hopper import quantise_tiles_kernel, tile_maxima_kernel
from moefold.kernels.quantise.quantise_tiles_triton import TileKernels

WARPS = {"num_warps": 8}  # as the layout of a tile asks
DELAYED_ROOM = WARPS | {"maxnreg": 80}  # three programs share a multiprocessor
GLUON_KERNELS = TileKernels(quantise_tiles_kernel, tile_maxima_kernel, WARPS)
GLUON_DELAYED_KERNEL = DelayedKernel(quantise_delayed_kernel, DELAYED_ROOM)
