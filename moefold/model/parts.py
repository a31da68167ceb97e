"""What assembly chose for a model: objects in place of flags. The model calls them and does not know which they are."""

from __future__ import annotations

from dataclasses import dataclass

from moefold.dispatch.base import Dispatcher
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World
from moefold.model.attention.context_parallel import ContextMechanism


@dataclass(frozen=True)
class ModelParts:
    """`dispatcher` carries tokens to experts; `context` is attention in which queries meet keys held
    by other ranks."""

    world: World
    kernels: BoundKernels
    dispatcher: Dispatcher
    context: ContextMechanism
    seq_len: int
