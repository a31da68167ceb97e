"""What assembly chose for a model: objects in place of flags. The model calls them and does not know which they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moefold.dispatch.base import Dispatcher
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World
from moefold.model.attention.context_parallel import ContextMechanism
from moefold.model.heads_in_exchanges import HeadsInExchanges
from moefold.precision.linear import TpProjections


@dataclass(frozen=True)
class ModelParts:
    """`dispatcher` carries tokens to experts; `contexts` are attention in which queries meet keys held by other ranks,
    by the number of ranks that share a sequence; `tp_projections` are projections of rows of all tensor-parallel ranks,
    and sums over them. `row_chunks`: parts of a microbatch that experts compute in turn. `heads_in_exchanges`: instead
    of attention's `tp_projections`, if heads are swapped inside of its projections."""

    world: World
    kernels: BoundKernels
    dispatcher: Dispatcher
    contexts: Mapping[int, ContextMechanism]
    tp_projections: TpProjections
    seq_len: int
    row_chunks: int = 1
    heads_in_exchanges: HeadsInExchanges | None = None
