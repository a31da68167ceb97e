"""moefold.register: a router score, a dispatcher, an attention, an optimizer rule and a data source from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moefold
from moefold.config.extensions import EXTENSION_KINDS, EXTENSIONS
from moefold.dispatch.local import LocalDispatcher
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.optim.adamw import AdamW

SIZES: dict[str, Any] = {"train__steps": 2, "data__seq_len": 32, "train__global_batch": 4, "data__source": "zipf"}


@pytest.fixture(autouse=True)
def forget_registered() -> Iterator[None]:
    before = dict(EXTENSIONS)
    yield
    for kind, name in EXTENSIONS.keys() - before.keys():
        EXTENSION_KINDS[kind].remove(name)
        del EXTENSIONS[kind, name]


def losses_of_run(**keys: Any) -> list[float]:
    with moefold.run(moefold.preset("tiny", **{**SIZES, **keys})) as run:
        return [run.step(batch).loss for batch in run]


def test_a_score_that_is_the_built_in_one_gives_its_numbers():
    """exp of the logits, normalised over the chosen, is the softmax over the chosen."""

    @moefold.register("router_score", "exponential", "exp of the logits")
    def exponential(logits_TE: torch.Tensor) -> torch.Tensor:
        return logits_TE.exp()

    without_bias = {"model__moe__balance__bias_rate": 0.0}  # which is added to scores of another size
    mine = losses_of_run(model__moe__router__score="exponential", **without_bias)
    assert mine == pytest.approx(losses_of_run(**without_bias), rel=1e-6)


def test_a_score_of_ones_own_differs_and_explain_says_which_kernel_cannot_run():
    @moefold.register("router_score", "squared", "the square of the logits")
    def squared(logits_TE: torch.Tensor) -> torch.Tensor:
        return logits_TE.square()

    layer = moefold.MoeLayer(hidden=16, experts=4, top_k=2, ffn=8, score="squared")
    plain = moefold.MoeLayer(hidden=16, experts=4, top_k=2, ffn=8)
    x = torch.randn(5, 16)
    assert not torch.allclose(layer(x)[0], plain(x)[0])
    assert "built-in score" in layer.explain()


def test_an_attention_from_outside_is_the_one_that_blocks_call():
    calls: list[int] = []

    @moefold.register("attention", "watched", "grouped-query attention that counts its calls")
    class Watched(GroupedQueryAttention):
        def forward(self, *inputs: Any) -> torch.Tensor:
            calls.append(1)
            return super().forward(*inputs)

    assert losses_of_run(model__attention__kind="watched") == losses_of_run()
    assert len(calls) >= 2 * 4


def test_a_data_source_from_outside_yields_documents():
    @moefold.register("data_source", "counting", "numbers as text")
    def counting(data: Any) -> Iterator[str]:
        for number in range(300):
            yield f"{number} and {number + 1} are neighbours\n"

    losses = losses_of_run(data__source="counting")
    assert len(losses) == 2


def test_an_optimizer_rule_from_outside_updates_its_group():
    updated: list[str] = []

    @moefold.register("optimizer_rule", "watched_adamw", "AdamW that notes its updates")
    class WatchedAdamW(AdamW):
        def update(self, *inputs: Any, **named: Any) -> None:
            updated.append("update")
            super().update(*inputs, **named)

    mine = losses_of_run(optim__groups=("*.router.weight: rule=watched_adamw",))
    assert mine == losses_of_run()
    assert updated


def test_a_dispatcher_from_outside_is_called_on_ranks_of_experts():
    """Built for one rank here: the builder gets the setting of the run."""
    built: list[Any] = []

    @moefold.register("dispatcher", "watched_local", "the local dispatcher", price=lambda *_: 1.0)
    def build(setting: Any) -> LocalDispatcher:
        built.append(setting)
        return LocalDispatcher(setting.row_policy, setting.kernels)

    from moefold.dispatch.build import find_builder

    assert find_builder("watched_local") is build
