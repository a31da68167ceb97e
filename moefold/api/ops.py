"""Single operations, bound for the tensors at hand: `moefold.ops.swiglu(gate_up, weights)`.

Each call picks the implementation that a run with such tensors would use. An op is looked up by its name in the
catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from moefold.api.choices import PRECISION_NAMES
from moefold.config.errors import one_of
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import AttentionShape, Facts
from moefold.kernels.registry import KernelOp, import_every_op


class BoundOps:
    """Attribute access gives an op by name; `dir(moefold.ops)` lists them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        ops = import_every_op()
        op = ops[one_of("operation of moefold.ops", name, ops)]
        return BoundOp(op)

    def __dir__(self) -> list[str]:
        return sorted(import_every_op())


class BoundOp:
    """One op; calling it runs the implementation for its inputs."""

    def __init__(self, op: KernelOp[..., Any]):
        self.op = op
        self.__doc__ = op.__doc__

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.implementation(*inputs)(*inputs, **named)

    def implementation(self, *inputs: Any) -> Callable[..., Any]:
        """What a call with these inputs runs."""
        return BoundKernels(facts_of_inputs(self.op.name, inputs))[self.op]


def facts_of_inputs(op: str, inputs: tuple[Any, ...]) -> Facts:
    """The facts that the catalog's conditions need, read off tensors."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    first = tensors[0]
    cuda = first.device.type == "cuda"
    width = common_width(tensors)
    return Facts(
        device=first.device.type,
        dtype=PRECISION_NAMES[first.dtype],
        capability=torch.cuda.get_device_capability(first.device) if cuda else (0, 0),
        hidden=width,
        ffn=width,
        attention=shape_of_attention(tensors) if op == "attention" else None,
        sees_all=op != "attention" or sees_all_positions(*inputs[4:]),
    )


def sees_all_positions(window: int = 0, *sinks_or_documents: torch.Tensor | None) -> bool:
    """Whether attention has no window, no sinks and no documents, which are the arguments behind the scale."""
    return window == 0 and all(x is None for x in sinks_or_documents)


def common_width(tensors: list[torch.Tensor]) -> int:
    """The largest width that divides the matrix dims of all tensors: what alignment is judged by."""
    sizes = [size for x in tensors if x.dim() > 1 for size in x.shape[-2 if x.dim() > 2 else -1 :]]
    return math.gcd(*sizes)


def shape_of_attention(tensors: list[torch.Tensor]) -> AttentionShape:
    q_BSHD, k_BLGD, v_BLGV = tensors[:3]
    _, length, heads, head_dim = q_BSHD.shape
    return AttentionShape(length, heads, k_BLGD.shape[2], head_dim, v_BLGV.shape[3])


ops = BoundOps()
