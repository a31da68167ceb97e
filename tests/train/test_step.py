"""Nonsense never reaches the weights, though nobody waits to see whether a step was sound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.config.refused import Failed
from moefold.layout.axes import alone
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble
from moefold.train.parity import random_corpus, shrunk
from moefold.train.step import refuse_nonsense, train_step


def small_run(precision: str = "fp32", moments: str = "fp32") -> Run:
    config = shrunk(PRESETS["tiny"](), 1)
    config = replace(config, train=replace(config.train, precision=precision))
    config = replace(config, optim=replace(config.optim, moments=moments))
    return assemble(config, alone(), Path("."), random_corpus(config))


def everything(run: Run) -> list[torch.Tensor]:
    """Weights, biases of routers, main weights and moments."""
    state = [values.clone() for *_, values in run.optimizer.state()]
    return [*(x.detach().clone() for x in run.model.state_dict().values()), *state]


def spoil(run: Run) -> list[torch.utils.hooks.RemovableHandle]:
    """Every gradient that flows through the last norm is no number."""
    return [run.model.head.norm.register_forward_hook(lambda *found: found[-1] * torch.nan)]


@pytest.mark.parametrize(("precision", "moments"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_a_step_that_is_nonsense_changes_nothing_and_neither_do_those_after_it(precision: str, moments: str):
    run = small_run(precision, moments)
    train_step(run, run.loader.next())
    before = everything(run)
    hooks = spoil(run)
    report = train_step(run, run.loader.next())
    for hook in hooks:
        hook.remove()
    sound_again = train_step(run, run.loader.next())  # begun before anybody has read the one before
    assert all(torch.equal(a, b) for a, b in zip(before, everything(run), strict=True))
    with pytest.raises(Failed, match="step 2: loss is nan and gradient norm is nan; the weights were not touched"):
        refuse_nonsense(run, report)
    assert sound_again.loss == sound_again.loss


def test_a_sound_step_is_not_refused_and_changes_the_weights():
    run = small_run()
    before = everything(run)
    report = train_step(run, run.loader.next())
    refuse_nonsense(run, report)
    assert not all(torch.equal(a, b) for a, b in zip(before, everything(run), strict=True))


def test_a_report_can_be_read_long_after_its_step():
    """What it tells is of its own step, whatever has happened since."""
    run, other = small_run(), small_run()
    late = [train_step(run, run.loader.next()) for _ in range(3)]
    at_once = []
    for _ in range(3):
        report = train_step(other, other.loader.next())
        at_once.append((report.number, report.loss, report.grad_norm, report.tokens, report.loads.counts_LE.tolist()))
    read = [(r.number, r.loss, r.grad_norm, r.tokens, r.loads.counts_LE.tolist()) for r in late]
    assert read == at_once
    assert all(report.seconds > 0 for report in late)
