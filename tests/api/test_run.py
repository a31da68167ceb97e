"""moefold.run and moefold.preset: the trainer's own step in a loop of one's own."""

from __future__ import annotations

import pytest

import moefold
from moefold.config.errors import UserError


def test_a_run_steps_as_the_trainer_does():
    config = moefold.preset("tiny", train__steps=2, data__source="zipf", data__seq_len=32, train__global_batch=4)
    losses = []
    for _ in range(2):
        with moefold.run(config) as run:
            losses.append([run.step(batch).loss for batch in run])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_a_preset_takes_keys_with_underscores_for_dots_and_refuses_all_problems_at_once():
    assert moefold.preset("tiny", model__moe__router__score="sigmoid").model.moe.router.score == "sigmoid"
    with pytest.raises(UserError) as refused:
        moefold.preset("tiny", train__step=3, optim__lr=-1.0)
    assert "train.step" in str(refused.value)
    assert "optim.lr" in str(refused.value)
