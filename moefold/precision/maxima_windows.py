"""Windows of largest magnitudes: those of the last steps, and of the step under way, of one set of experts or channels.

Windows that were joined lie side by side in one tensor of all steps and one of the step under way, so that one pass
reads or writes all of them.

H steps, T values of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.layout.axes import Axis, World
from moefold.layout.declare import Declaration, PartOfTensor


class MaximaWindow:
    """Largest magnitudes of the last steps, `last` (H, ...), and of the step under way so far, `now`: this rank's part
    of the tensor that `declaration` describes, on which the ranks of `axis` agree."""

    def __init__(self, steps: int, declaration: Declaration, world: World, axis: Axis):
        self.declaration = declaration
        self.part = declaration.part(world)
        self.axis = axis
        device = world.device
        sizes = [size for _, size in self.part]
        self.last = torch.zeros(steps, *sizes, device=device)
        self.now = torch.zeros(sizes, device=device)

    def state(self) -> PartOfTensor:
        steps = len(self.last)
        shape = (steps, *self.declaration.shape)
        all_steps = (0, steps)
        box = [all_steps, *self.part]
        return PartOfTensor(self.last, shape, box)


class JoinedWindows:
    """Windows side by side, which become views of `last_HT` and `now_T`."""

    def __init__(self, windows: Sequence[MaximaWindow]):
        lasts = [window.last.flatten(1) for window in windows]
        nows = [window.now.flatten() for window in windows]
        self.sizes = [len(now_t) for now_t in nows]
        self.last_HT = torch.cat(lasts, 1)
        self.now_T = torch.cat(nows)
        begin = 0
        for window, size in zip(windows, self.sizes, strict=True):
            shape = window.now.shape
            last_HC = self.last_HT.narrow(1, begin, size)
            now_C = self.now_T.narrow(0, begin, size)
            window.last = last_HC.unflatten(1, shape)
            window.now = now_C.view(shape)
            begin += size


def last_of_neighbours(windows: Sequence[MaximaWindow]) -> Tensor:
    """The last steps of windows that lie side by side in this order, (H, T)."""
    first = windows[0].last
    begin = first.storage_offset()
    values = 0
    for window in windows:
        assert window.last.storage_offset() == begin + values, "windows of one table are neighbours"
        values += window.now.numel()
    shape = (len(first), values)
    return first.as_strided(shape, (first.stride(0), 1))
