"""The configuration of an evaluation: what has results on several ranks, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moefold.config.errors import UserError
from moefold.config.run import Config, ParallelConfig
from moefold.presets.zoo import PRESETS
from moefold.train.evaluation_config import evaluation_config, require_evaluation, with_layout_overrides

TINY = PRESETS["tiny"]().model


def with_router(**changes: Any) -> Config:
    router = replace(TINY.moe.router, looks_ahead=True, **changes)
    balance = replace(TINY.moe.balance, bias_rate=0.0)
    model = replace(TINY, moe=replace(TINY.moe, router=router, balance=balance))
    return evaluation_config(model, ParallelConfig(), 64, 2)


def test_sequences_are_padded_to_what_splits_over_ranks():
    parallel = ParallelConfig(cp=2, tp=2)
    config = evaluation_config(TINY, parallel, 61, 4)
    assert config.data.seq_len == 64
    require_evaluation(config, 4)


@pytest.mark.parametrize("changes", [{"kind": "expert_choice"}, {"kind": "sinkhorn"}, {"force_balance": True}])
def test_routers_that_padding_would_change_are_refused_on_several_ranks_alone(changes: dict[str, Any]):
    config = with_router(**changes)
    name = changes.get("kind", "force_balance")
    with pytest.raises(UserError, match=f"model.moe.router: {name} .* evaluate on one rank"):
        require_evaluation(config, 2)
    require_evaluation(config, 1)


def test_layouts_are_read_with_the_problems_of_their_keys():
    assert with_layout_overrides(ParallelConfig(tp=2), ["--parallel.ep=4"]) == ParallelConfig(tp=2, ep=4)
    with pytest.raises(UserError, match=r"parallel.ep = many is not legal"):
        with_layout_overrides(ParallelConfig(), ["--parallel.ep", "many"])
    with pytest.raises(UserError, match=r'no key "paralel.ep" .did you mean "parallel.ep"'):
        with_layout_overrides(ParallelConfig(), ["--paralel.ep", "2"])
