"""What assembly chose for a model: objects in place of flags. The model calls them and does not know which they are."""

from __future__ import annotations

from dataclasses import dataclass

from moefold.dispatch.base import Dispatcher
from moefold.kernels.bind import Kernels
from moefold.layout.axes import World
from moefold.model.attention.context import Context


@dataclass(frozen=True)
class Choices:
    """`dispatcher` carries tokens to experts; `context` lets queries meet keys held by other ranks."""

    world: World
    kernels: Kernels
    dispatcher: Dispatcher
    context: Context
    seq_len: int
