"""Products of experts whose results are known: another kernel has computed them, and backward is that of the product.

    forward     hands on what is known, and saves what the product saves
    backward    gradients of rows and of weights, as those of the product are

So kernels that multiply inside exchanges need no backward of their own: the experts are run once more for their
backward, with known products in place of theirs. A fused kernel reads the known pre-activation by itself.

R rows sorted by expert, D width, F inner width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from moefold.kernels.experts.expert_mlp import ExpertParts
from moefold.kernels.linear.linear import GroupedGemms, GroupedProducts
from moefold.kernels.linear.product import PLAIN, ExpertRows, multiply

MakeResult = Callable[[], Tensor]


class KnownProducts(GroupedProducts):
    """Grouped products whose forward is `result`, which is held until then and no longer."""

    def __init__(self, gemms: GroupedGemms, ends_E: Tensor, result: Tensor):
        super().__init__(gemms, ends_E)
        self.results = [result]

    def forward(self, x: Any, w: Any, bias: Tensor | None) -> Tensor:
        return self.results.pop()


def known_product(gemms: GroupedGemms, result_RN: Tensor, x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    products = KnownProducts(gemms, ends_E, result_RN)
    (y_RN,) = multiply(x_RD, [(w_END, None)], PLAIN, products, ExpertRows(ends_E))
    return y_RN


def known_up_product(gemms: GroupedGemms, h_R2F: Tensor, x_RD: Tensor, gate_up_E2FD: Tensor, ends_E: Tensor) -> Tensor:
    h_RN = known_product(gemms, h_R2F.flatten(1), x_RD, gate_up_E2FD.flatten(1, 2), ends_E)
    return h_RN.view_as(h_R2F)


def unread_down_product(
    gemms: GroupedGemms, a_RF: Tensor, down_EDF: Tensor, ends_E: Tensor, inside_R: Tensor | None
) -> Tensor:
    """A result that nobody reads takes no memory."""
    width = down_EDF.shape[1]
    nothing = a_RF.new_empty(1, 1).expand(len(a_RF), width)
    return known_product(gemms, nothing, a_RF, down_EDF, ends_E)


def with_known_products(parts: ExpertParts, h_R2F: Tensor, gemms: GroupedGemms) -> ExpertParts:
    """The parts of experts that are run for their backward alone."""
    up = partial(known_up_product, gemms, h_R2F)
    down = partial(unread_down_product, gemms)
    return parts._replace(up=up, down=down, known_h_R2F=h_R2F)
