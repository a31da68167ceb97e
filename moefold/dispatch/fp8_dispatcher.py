"""FP8 dispatch: any dispatcher that can send rows, with tokens or gradients sent as FP8 payloads.

    dispatch, forward    tokens are quantised once, before they are sent, and experts read the dequantised rows
    combine, backward    the gradient of combine's output in the same way, in a format of its own
    combine, forward     sums in the model's dtype, as the dispatcher sends them
    dispatch, backward   the same

A block of 128 values of a row has a scale (kernels/quantise/fp8_payload.py). What experts quantise again, along rows
or along columns, are the dequantised rows: along rows with the same scales they get the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moefold.config.run import PrecisionConfig
from moefold.dispatch.base import Dispatcher, Receipt, Routing, Rows, plan_parts
from moefold.kernels.bound import BoundKernels
from moefold.kernels.quantise.fp8 import E4M3, E5M2, ScaleRule
from moefold.kernels.quantise.fp8_payload import row_payload_bytes
from moefold.kernels.quantise.payload_ops import PayloadOps, payload_ops
from moefold.kernels.routing.expert_rows import sum_rows

GRADIENT_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@runtime_checkable
class SendsRows(Protocol):
    """A dispatcher whose exchanges carry rows of any dtype and width, each the transpose of the other."""

    def plan(self, routing: Routing) -> Receipt: ...

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows: ...

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor: ...

    def send(
        self,
        x_TD: Tensor,
        receipt: Receipt,
    ) -> Tensor:
        """Rows of tokens to the ranks of their experts: x_ND."""
        ...

    def give_back(
        self,
        y_ND: Tensor,
        receipt: Receipt,
    ) -> Tensor:
        """Rows of arrived tokens back to the ranks of the tokens, summed for each token: y_TD."""
        ...


class Fp8Dispatcher:
    """`tokens`, `gradients`: rules of what is quantised; None: that direction is sent as it is. `width`: of a row."""

    def __init__(
        self,
        inner: SendsRows,
        kernels: BoundKernels,
        width: int,
        tokens: ScaleRule | None,
        gradients: ScaleRule | None,
    ):
        self.inner = inner
        self.token_bytes = row_payload_bytes(width) if tokens else 0
        self.sum_rows = kernels[sum_rows]
        self.payloads = payload_ops(kernels)
        self.tokens = tokens
        self.gradients = gradients

    def plan(self, routing: Routing) -> Receipt:
        receipt = self.inner.plan(routing)
        return receipt._replace(token_bytes=self.token_bytes)

    def plan_parts(self, routings: Sequence[Routing]) -> list[Receipt]:
        receipts = plan_parts(self.inner, routings)
        return [receipt._replace(token_bytes=self.token_bytes) for receipt in receipts]

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        if self.tokens is None:
            return self.inner.dispatch(h_TD, receipt)
        source_ND = SendTokens.apply(h_TD, self.inner, receipt, self.tokens, self.payloads)
        return Rows(source_ND, receipt.order)  # pyright: ignore[reportArgumentType]

    def combine(
        self,
        y_RD: Tensor,
        receipt: Receipt,
    ) -> Tensor:
        if self.gradients is None:
            return self.inner.combine(y_RD, receipt)
        order = receipt.order
        y_ND = self.sum_rows(y_RD, order.index_R, order.slots_NK, order.holes)
        way_back = (self.inner, receipt, self.gradients, self.payloads)
        return GiveBackSums.apply(y_ND, *way_back)  # pyright: ignore[reportReturnType]


def send_quantised(
    x_TD: Tensor,
    inner: SendsRows,
    receipt: Receipt,
    rule: ScaleRule,
    payloads: PayloadOps,
) -> Tensor:
    """The rows that arrive, dequantised."""
    payload_TB = payloads.pack_rows(x_TD, rule)
    arrived_NB = inner.send(payload_TB, receipt)
    x_ND = x_TD.new_empty((len(arrived_NB), x_TD.shape[1]))
    payloads.sum_rows(x_ND, arrived_NB[None], rule.format)
    return x_ND


class SendTokens(torch.autograd.Function):
    """Backward sends the gradient as it is."""

    @staticmethod
    def forward(
        ctx,
        h_TD,
        inner,
        receipt,
        rule,
        payloads,
    ):
        ctx.way_back = (inner, receipt)
        return send_quantised(h_TD, inner, receipt, rule, payloads)

    @staticmethod
    def backward(ctx, *gradients):
        inner, receipt = ctx.way_back
        dy_ND = gradients[0].contiguous()
        dh_TD = inner.give_back(dy_ND, receipt)
        return dh_TD, None, None, None, None


class GiveBackSums(torch.autograd.Function):
    """Backward sends the gradient in FP8."""

    @staticmethod
    def forward(
        ctx,
        y_ND,
        inner,
        receipt,
        rule,
        payloads,
    ):
        ctx.way_back = (inner, receipt, rule, payloads)
        return inner.give_back(y_ND, receipt)

    @staticmethod
    def backward(ctx, *gradients):
        dy_ND = send_quantised(gradients[0], *ctx.way_back)
        return dy_ND, None, None, None, None


def unquantised(dispatcher: Dispatcher) -> Dispatcher:
    """The dispatcher that sends everything as it is."""
    return dispatcher.inner if isinstance(dispatcher, Fp8Dispatcher) else dispatcher


def token_rule(precision: PrecisionConfig) -> ScaleRule | None:
    if precision.dispatch == "plain":
        return None
    return ScaleRule(E4M3, precision.power_of_two_scales)


def gradient_rule(precision: PrecisionConfig) -> ScaleRule | None:
    if precision.combine_gradient == "plain":
        return None
    number_format = GRADIENT_FORMATS[precision.combine_gradient]
    return ScaleRule(number_format, precision.power_of_two_scales)
