"""What the experts keep for the backward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.autograd.graph import saved_tensors_hooks

from moefold.config.run import ModelConfig, MoeConfig
from moefold.dispatch.base import Routing, Rowing
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bind import bind
from moefold.kernels.catalog import Facts
from moefold.layout.axes import alone
from moefold.model.initialise import initialise
from moefold.model.moe.experts import Experts
from moefold.train.assemble import default_dtype

TOKENS, HIDDEN, K = 64, 32, 2
MODEL = ModelConfig(hidden=HIDDEN, moe=MoeConfig(experts=4, top_k=K, ffn=16))


def saved_bytes(gate: str) -> int:
    """Bytes of all tensors that forward keeps, each storage once, weights and inputs aside."""
    kernels = bind(Facts("cpu", "bf16", hidden=HIDDEN, ffn=16))
    with default_dtype(torch.bfloat16):
        experts = Experts(replace(MODEL, moe=replace(MODEL.moe, gate=gate)), kernels, alone())
    initialise(experts, seed=1)
    h = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    probs = torch.rand(TOKENS, K, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    ids = torch.stack((torch.arange(TOKENS) % 4, (torch.arange(TOKENS) + 1) % 4), dim=1)
    dispatcher = LocalDispatcher(Rowing(0, 4), kernels)
    rows = dispatcher.dispatch(h, dispatcher.plan(Routing(probs, ids)))
    known = {t.untyped_storage().data_ptr() for t in (*experts.parameters(), h, probs, *rows.order[:4])}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        y = experts(rows)
    alive = y.sum()  # noqa: F841  keeps the graph, so that no storage is used twice
    return sum(kept.values())


def test_the_gate_inside_the_activation_saves_exactly_the_experts_output():
    assert saved_bytes("output") - saved_bytes("activation") == TOKENS * K * HIDDEN * 2
