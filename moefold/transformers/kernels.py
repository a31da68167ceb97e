"""Kernels for the tensors of a transformers model: chosen once for every device, dtype and shape."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moefold.config.errors import UserError
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import AttentionShape, Facts
from moefold.layout.dtypes import DTYPES
from moefold.train.assemble import device_capability

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
