"""The products that a model gives to its `tp_projections` are those that explain names, whoever multiplies them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefold.anatomy.exchanged_products import exchanged_products
from moefold.layout.axes import single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.precision.linear import Linear, LinearGroup
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import choose_kernels
from tests.support.models import choices

LATENTS = ["--model.attention.kind=mla", "--model.attention.qk_norm=none", "--model.attention.kv_heads=4"]
LATENTS += ["--model.attention.rope_dim=8"]
MODELS = {
    "dense and gated shared MLPs": [
        "--model.moe.shared_ffn=32",
        "--model.moe.shared_gate=true",
        "--model.moe.dense_layers=1",
    ],
    "latents, a layer ahead, MLPs without a gate": [
        *LATENTS,
        "--model.mtp=1",
        "--model.moe.dense_layers=1",
        "--model.dense_activation=relu2",
    ],
}


class NotedProjections:
    """Projections of one rank, which has all rows: a second implementation of `TpProjections`."""

    def __init__(self) -> None:
        self.gathered: set[nn.Module] = set()
        self.scattered: set[nn.Module] = set()

    def gather(self, h_TD: Tensor, layers: nn.Module, around: Callable[..., Any]) -> Any:
        self.gathered.update(layers.layers if isinstance(layers, LinearGroup) else [layers])
        return layers(h_TD)

    def scatter(self, x_CN: Tensor, layer: Linear, around: Callable[..., Any]) -> Tensor:
        self.scattered.add(layer)
        return around(layer, x_CN)

    def require_peers(self) -> None: ...


@pytest.mark.parametrize("name", MODELS)
def test_the_products_inside_exchanges_are_those_that_are_named(name: str):
    config = resolve_recipe("tiny", [*MODELS[name], "--train.precision=fp32", "--data.seq_len=8"], 1)
    world = single_rank_world()
    kernels = choose_kernels(config, world)
    noted = NotedProjections()
    model = Transformer(config.model, replace(choices(config.model, 8, kernels), tp_projections=noted))
    initialise_parameters(model, 1)
    tokens_BS = torch.zeros(1, 8, dtype=torch.long)
    model(tokens_BS, tokens_BS)
    expected = exchanged_products(config)
    assert places_of(noted.gathered, model) == set(expected.gathered)
    assert places_of(noted.scattered, model) == set(expected.scattered)


def places_of(layers: set[nn.Module], model: nn.Module) -> set[str]:
    """Names inside their layers."""
    names = [name for name, module in model.named_modules() if module in layers]
    return {re.sub(r".*?\b(attention|dense|moe)\.", r"\1.", name) for name in names}
