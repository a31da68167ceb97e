"""Main weights that are kept as two halves, seen as one fp32 tensor: to read, to load into, to cut into parts.

A checkpoint holds main weights as fp32 whatever a run keeps; what passes through here is made part by part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, upper_bfloat16

aten = torch.ops.aten
VIEW_OPERATIONS = {aten.slice.Tensor, aten.select.int, aten.view.default, aten.unsqueeze.default, aten.detach.default}


class SplitFp32(torch.Tensor):
    """`upper` are the bf16 weights of the model, `lower` the 16 bits they lack (kernels/optimizer/split_fp32.py)."""

    upper: torch.Tensor
    lower: torch.Tensor

    @staticmethod
    def __new__(cls, upper: torch.Tensor, lower: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(cls, upper.shape, dtype=torch.float32, device=upper.device)
        made.upper, made.lower = upper, lower
        return made

    def whole(self) -> torch.Tensor:
        return joined_fp32(self.upper, self.lower)

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.whole()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if operation in VIEW_OPERATIONS:
            return cls(*(operation(half, *args[1:]) for half in (args[0].upper, args[0].lower)))
        plain, named = tree_map(lambda x: x.whole() if isinstance(x, cls) else x, (args, kwargs or {}))
        out = operation(*plain, **named)
        if operation._schema.is_mutable and isinstance(args[0], cls):
            args[0].upper.copy_(upper_bfloat16(plain[0]))
            args[0].lower.copy_(lower_16_bits(plain[0]))
            return args[0]
        return out
