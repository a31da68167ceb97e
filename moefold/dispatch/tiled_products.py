"""What dense products inside exchanges over an arena have in common: how they exchange, and gradients of weights."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from moefold.comm.arena import Arena
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.choices import accumulating_products_run
from moefold.kernels.linear.linear import DENSE_PRODUCTS, FUSED_DGRAD_PRODUCTS
from moefold.kernels.linear.product import Operand
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.routing.arrival_pieces import PieceSignals
from moefold.layout.deferred_wgrad import gradient_or_defer, open_queue

Shards = tuple[int, ...]  # rows of each rank


class ArenaProducts:
    """`signals` of kernels; None: the references, between which the arena exchanges. `flags`: of one sender."""

    def __init__(self, arena: Arena, kernels: BoundKernels, signals: PieceSignals | None = None, flags: int = 0):
        self.arena = arena
        self.signals = signals
        self.flags = flags
        accumulates = accumulating_products_run(kernels.facts)
        self.products = FUSED_DGRAD_PRODUCTS if accumulates else DENSE_PRODUCTS

    def even_shards(self, rows: int) -> Shards:
        return (rows,) * self.arena.axis.size

    def exchange(self, what: str, shards: Shards) -> ProductExchange:
        end = partial(self.arena.exchange, what)
        return ProductExchange(self.arena.axis.index, shards, end, self.signals, self.flags)

    def weight_gradient(self, weight_ND: Tensor, dy_CN: Tensor, x_CD: Tensor) -> Tensor | None:
        compute = partial(self.products.weight, Operand(dy_CN), Operand(x_CD), weight_ND)
        return gradient_or_defer(weight_ND, compute)


def kept_for_gradients(arrived: Tensor) -> Tensor:
    """What has arrived in memory of an exchange, copied if gradients of weights are computed later."""
    return arrived if open_queue() is None else arrived.clone()
