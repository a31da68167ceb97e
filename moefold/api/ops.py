"""Single operations, bound for the tensors at hand: `moefold.ops.swiglu(gate_up, weights)`.

Each call picks the implementation that a run with such tensors would use. An op is looked up by its name in the
catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moefold.api.choices import PRECISION_NAMES
from moefold.config.errors import one_of
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import AttentionShape, Facts
from moefold.kernels.registry import KernelOp, import_every_op
from moefold.train.assemble import device_capability


class BoundOps:
    """Attribute access gives an op by name; `dir(moefold.ops)` lists them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        ops = import_every_op()
        known = one_of("operation of moefold.ops", name, ops)
        op = ops[known]
        return BoundOp(op)

    def __dir__(self) -> list[str]:
        return sorted(import_every_op())


class BoundOp:
    """One op; calling it runs the implementation for its inputs."""

    def __init__(self, op: KernelOp[..., Any]):
        self.op = op
        self.__doc__ = op.__doc__

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        run = self.implementation(*inputs)
        return run(*inputs, **named)

    def implementation(self, *inputs: Any) -> Callable[..., Any]:
        """What a call with these inputs runs."""
        facts = facts_of_inputs(self.op.name, inputs)
        return BoundKernels(facts)[self.op]


def facts_of_inputs(op: str, inputs: tuple[Any, ...]) -> Facts:
    """The facts that the catalog's conditions need, read off tensors."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    floats = [x for x in tensors if x.is_floating_point()]
    device = floats[0].device
    width = common_width(floats)
    is_attention = op == "attention"
    is_square = True
    if is_attention:
        is_square = inputs[0].shape[1] == inputs[1].shape[1]
    return Facts(
        device=device.type,
        dtype=PRECISION_NAMES[floats[0].dtype],
        capability=device_capability(device),
        hidden=width,
        ffn=width,
        attention=shape_of_attention(floats) if is_attention else None,
        sees_all=not is_attention or sees_all_positions(*inputs[4:]),
        square=is_square,
    )


def sees_all_positions(window: int = 0, *sinks_or_documents: Tensor | None) -> bool:
    """Whether attention has no window, no sinks and no documents, which are the arguments behind the scale."""
    return window == 0 and all(x is None for x in sinks_or_documents)


def common_width(tensors: list[Tensor]) -> int:
    """The largest width that divides the matrix dims of all tensors: what alignment is judged by."""
    sizes: list[int] = []
    for x in tensors:
        if x.dim() > 1:
            matrix_dims = min(2, x.dim() - 1)
            sizes += x.shape[-matrix_dims:]
    return math.gcd(*sizes)


def shape_of_attention(tensors: list[Tensor]) -> AttentionShape:
    q_BSHD, k_BLGD, v_BLGV = tensors[:3]
    _, length, heads, head_dim = q_BSHD.shape
    kv_heads = k_BLGD.shape[2]
    value_dim = v_BLGV.shape[3]
    return AttentionShape(length, heads, kv_heads, head_dim, value_dim)


ops = BoundOps()
