"""Kernels for the tensors of a transformers model: chosen once for every device, dtype and shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from moefold.config.errors import UserError
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import AttentionShape, Facts
from moefold.kernels.registry import KernelOp
from moefold.layout.dtypes import DTYPES
from moefold.train.assemble import device_capability

P = ParamSpec("P")
R = TypeVar("R")
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


@cache
def base_kernels(device: torch.device, dtype: torch.dtype) -> BoundKernels:
    if dtype not in PRECISIONS:
        known = ", ".join(PRECISIONS.values())
        raise UserError(
            f"weights in {dtype} are not supported by moefold inside transformers; expected one of {known}; "
            'set experts_implementation="grouped_mm" and attn_implementation="sdpa" for this model'
        )
    capability = device_capability(device)
    facts = Facts(device.type, PRECISIONS[dtype], capability)
    return BoundKernels(facts)


def kernels_for(x: Tensor) -> BoundKernels:
    return base_kernels(x.device, x.dtype)


def kernel_for(x: Tensor, op: KernelOp[P, R]) -> Callable[P, R]:
    """Inside a compiled graph the reference: it is plain torch, which can be traced."""
    if torch.compiler.is_compiling():
        return op.reference
    return kernels_for(x)[op]


@cache
def expert_kernels(device: torch.device, dtype: torch.dtype, hidden: int, ffn: int, unfused: str) -> BoundKernels:
    """`unfused`: what keeps the experts off the fused kernel, or nothing."""
    kernels = base_kernels(device, dtype)
    return kernels.with_facts(hidden=hidden, ffn=ffn, unfused_experts=unfused)


@cache
def attention_kernels(device: torch.device, dtype: torch.dtype, shape: AttentionShape, plain: bool) -> BoundKernels:
    """`plain`: every query sees all positions up to its own, and there is a query for each."""
    kernels = base_kernels(device, dtype)
    return kernels.with_facts(attention=shape, sees_all=plain, square=plain)
