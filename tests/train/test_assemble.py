"""Ranks that were started differently are refused before they train, and what never moves is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from moefold.config.errors import UserError
from moefold.config.read import config_as_yaml
from moefold.config.run import ParallelConfig
from moefold.layout.agreement import comparable_settings
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.observe.printer import print_nothing
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run, require_agreement
from moefold.train.evaluate import validation_loss
from moefold.train.loop import keep_measured, no_gradient_warnings
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import train_step
from tests.support.ranks import run_ranks


def started_differently(world: World) -> str:
    config = PRESETS["tiny"]()
    if world.rank == 2:
        config = replace(config, optim=replace(config.optim, lr=0.5))
    try:
        require_agreement(comparable_settings(config), world)
    except UserError as refused:
        return str(refused)
    return "agreed"


def test_a_rank_with_another_setting_is_refused_on_every_rank_by_key_and_rank():
    for text in run_ranks(started_differently, 3):
        assert text == "optim.lr = 0.5 on rank 2, but 0.004 on rank 0; start all ranks alike"


def started_with_other_code(world: World) -> str:
    import moefold.layout.agreement as module

    if world.rank == 1:
        module.source_digest = lambda: "another"
    try:
        require_agreement(module.code_versions(), world)
    except UserError as refused:
        return str(refused)
    return "agreed"


def test_a_rank_with_other_code_is_refused():
    for text in run_ranks(started_with_other_code, 2):
        assert "moefold source = another on rank 1" in text


def test_a_parameter_that_never_gets_a_gradient_is_named():
    config = shrink_config(PRESETS["tiny"](), 1)
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))
    attention = run.model.blocks[1].attention
    attention.out.weight.register_hook(torch.zeros_like)  # as if its backward were not connected
    for _ in range(3):
        train_step(run, run.loader.next_batch())
        run.gradients.note_moved()
    assert [line.split()[1] for line in no_gradient_warnings(run)] == ["blocks.1.attention.out.weight"]


def uneven_validation(world: World) -> float:
    config = shrink_config(replace(PRESETS["tiny"](), parallel=ParallelConfig(ep=4)), 4)
    config = replace(config, train=replace(config.train, validate_sequences=5, precision="fp64"))
    here = create_world(world.rank, 4, world.device, config.parallel) if world.size > 1 else single_rank_world()
    config = config if world.size > 1 else replace(config, parallel=ParallelConfig())
    return validation_loss(assemble_run(config, here, Path("."), random_corpus(config)))


def test_validation_on_a_number_of_sequences_that_does_not_split_neither_hangs_nor_differs():
    one = uneven_validation(single_rank_world())
    for loss in run_ranks(uneven_validation, 4):
        assert abs(loss - one) < 1e-12


def dispatcher_on_resume(out: Path, parallel: ParallelConfig) -> str:
    config = replace(PRESETS["tiny"](), parallel=parallel)
    kept = keep_measured(config, single_rank_world(), out, print_nothing)
    return kept.parallel.dispatcher


def test_a_resumed_run_keeps_the_dispatcher_that_auto_chose_on_its_layout(tmp_path: Path):
    auto = ParallelConfig(ep=2)
    assert dispatcher_on_resume(tmp_path, auto) == "auto", "a folder without a run"
    saved = replace(PRESETS["tiny"](), parallel=replace(auto, dispatcher="all_gather"))
    (tmp_path / "config.yaml").write_text(config_as_yaml(saved))
    assert dispatcher_on_resume(tmp_path, auto) == "all_gather"
    assert dispatcher_on_resume(tmp_path, replace(auto, dispatcher="dedup")) == "dedup", "set by the user"
    assert dispatcher_on_resume(tmp_path, replace(auto, ep=4)) == "auto", "another layout"
    (tmp_path / "config.yaml").write_text("parallel: {ep: 2")
    assert dispatcher_on_resume(tmp_path, auto) == "auto", "a file cut short"
