"""The steps that `memory.graphs static` captures: those whose shapes do not depend on routing and whose work is many
kernels. Torch-free.

    attend > route > plan > dispatch > experts > combine > add        captured: attend, route, mlp, shared
             route > shared >                              add
"""

from __future__ import annotations

CAPTURED_READS: dict[str, tuple[str, ...]] = {  # by step: the entries of the carry that it reads
    "attend": ("stream",),
    "route": ("stream", "aux", "imposed"),
    "mlp": ("stream",),
    "shared": ("h_TD",),
}
