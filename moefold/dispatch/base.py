"""The contract of a dispatcher: three verbs between the router and the experts.

    plan(routing) -> Receipt          all metadata; the only place that may wait for the device
    dispatch(h_TD, receipt) -> Rows   tokens travel to where their experts are
    combine(y_RD, receipt) -> h_TD    results come back and are summed per token

T tokens, K choices of a token, R rows (one for each token and chosen expert held here), E experts, e experts held
here, N source rows, D width. Rows are described, not copied: row r is `source_ND[index_R[r]]`, and a kernel may gather
inside its GEMM. No collective may depend on the routing of one rank: a rank with no rows takes part like any other.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Routing(NamedTuple):
    """What a router decided: for each token its experts and their weights (the gates, differentiable)."""

    probs_TK: torch.Tensor
    ids_TK: torch.Tensor


class Receipt(NamedTuple):
    """How this routing travels: kept between dispatch and combine, and for their backward."""

    index_R: torch.Tensor
    slots_NK: torch.Tensor
    gate_R: torch.Tensor
    offsets_e: torch.Tensor


class Rows(NamedTuple):
    """The experts' input. The rows of one expert are contiguous and end before `offsets_e[e]` (int32, on the device).

    `slots_NK[n]` are the rows made from source n, so that the backward of the gather is itself a gather.
    """

    source_ND: torch.Tensor
    index_R: torch.Tensor
    slots_NK: torch.Tensor
    gate_R: torch.Tensor
    offsets_e: torch.Tensor


class Dispatcher(Protocol):
    def plan(self, routing: Routing) -> Receipt: ...

    def dispatch(self, h_TD: torch.Tensor, receipt: Receipt) -> Rows: ...

    def combine(self, y_RD: torch.Tensor, receipt: Receipt) -> torch.Tensor: ...
