"""What groups send is measured alike on all ranks, and a run plans with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.config.read import config_as_yaml
from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.model.attention.context_parallel import CONTEXT_MECHANISMS
from moefold.observe.printer import print_nothing
from moefold.train.assemble import Run, assemble_run, choose_kernels
from moefold.train.context_sending import resolve_sending
from moefold.train.loop import introduction_lines, keep_measured
from moefold.train.parity import single_rank_config
from tests.support.ranks import run_ranks
from tests.train.test_packed_runs import corpus, packed

RANKS = 4
Sizes = list[list[int]]  # of the groups of a rank, by batch


def configuration(context: str) -> Config:
    config = packed(RANKS, {"sinks": True}, cp=2, context=context)
    attention = replace(config.model.attention, heads=4, kv_heads=4)
    parallel = replace(config.parallel, context_sizes="dynamic")
    return replace(config, model=replace(config.model, attention=attention), parallel=parallel)


def on_two_nodes(world: World, config: Config) -> World:
    return create_world(world.rank, world.size, world.device, config.parallel, node_size=2)


def measured(world: World) -> list[tuple[str, ...]]:
    """By mechanism."""
    found: list[tuple[str, ...]] = []
    for context in CONTEXT_MECHANISMS:
        config = configuration(context)
        here = on_two_nodes(world, config)
        found.append(resolve_sending(config, choose_kernels(config, here), here))
    return found


def groups_of_runs(world: World) -> tuple[tuple[str, ...], Sizes, Sizes]:
    """What a run has measured, its groups, and those of a run which is told."""
    config = configuration("ring")
    here = on_two_nodes(world, config)
    run = assemble_run(config, here, Path("."), corpus())
    sending = run.config.parallel.context_sending
    assert any("so many keys: 2: " in line for line in introduction_lines(run))
    told = replace(config, parallel=replace(config.parallel, context_sending=sending))
    return sending, sizes_of(run), sizes_of(assemble_run(told, here, Path("."), corpus()))


def sizes_of(run: Run) -> Sizes:
    batches = [run.loader.next_batch() for _ in range(2)]
    return [[part.cp_size or 0 for part in batch.parts] for batch in batches]


def test_ranks_measure_the_same_by_every_mechanism():
    for sendings in zip(*run_ranks(measured, RANKS), strict=True):
        assert len(set(sendings)) == 1
        keys = [float(text) for text in sendings[0]]
        assert len(keys) == 2
        assert min(keys) > 0


def test_a_run_that_is_told_what_was_measured_has_the_same_groups():
    for sending, own, told in run_ranks(groups_of_runs, RANKS):
        assert len(sending) == 2
        assert own == told


def kept_on_resume(world: World, out: Path, saved: tuple[str, ...], **changes: Any) -> tuple[str, ...]:
    """What a run takes from a folder with the settings of another, of which it changes some."""
    config = packed(RANKS, cp=2)
    before = replace(config.parallel, context_sizes="dynamic", context="ring")
    settings = config_as_yaml(replace(config, parallel=replace(before, context_sending=saved)))
    run_on_rank_zero(partial((out / "config.yaml").write_text, settings), world, out)
    changed = replace(config, parallel=replace(before, **changes))
    here = create_world(world.rank, world.size, world.device, changed.parallel)
    return keep_measured(changed, here, out, print_nothing).parallel.context_sending


def mechanisms(world: World, out: Path) -> dict[str, str]:
    """Of a run that chooses its own, and of what is kept from the folder of a run with another."""
    free = packed(RANKS, cp=2)
    here = on_two_nodes(world, free)
    run = assemble_run(free, here, Path("."), corpus())
    name = run.config.parallel.context
    assert any(line.startswith(f"context: {name} (least predicted time") for line in introduction_lines(run))
    settings = config_as_yaml(replace(free, parallel=replace(free.parallel, context="all_gather")))
    run_on_rank_zero(partial((out / "config.yaml").write_text, settings), world, out)
    changed = replace(free, parallel=replace(free.parallel, context="all_to_all"))
    kept = {name: keep_measured(each, here, out, print_nothing) for name, each in (("auto", free), ("set", changed))}
    found = {"chosen": name, **{name: each.parallel.context for name, each in kept.items()}}
    alone = assemble_run(single_rank_config(free), single_rank_world(), Path("."), corpus())
    return found | {"alone": alone.config.parallel.context, "said": alone.context_reason}


def test_a_run_chooses_one_mechanism_on_all_ranks_says_why_and_keeps_that_of_its_folder(tmp_path: Path):
    found = run_ranks(mechanisms, RANKS, tmp_path)
    assert found == [found[0]] * RANKS
    assert found[0].pop("chosen") in CONTEXT_MECHANISMS
    assert found[0] == {"auto": "all_gather", "set": "all_to_all", "alone": "auto", "said": ""}


def kept_in_cases(world: World, out: Path) -> dict[str, tuple[str, ...]]:
    keys = ("1.5e+03", "20")
    return {
        "the same": kept_on_resume(world, out, keys),
        "set by the user": kept_on_resume(world, out, keys, context_sending=("0",)),
        "another layout": kept_on_resume(world, out, keys, cp=4),
        "another mechanism": kept_on_resume(world, out, keys, context="all_gather"),
        "fewer ranks before": kept_on_resume(world, out, keys[:1]),
        "more ranks before": kept_on_resume(world, out, (*keys, "10")),
    }


def test_a_resumed_run_keeps_what_was_measured_on_its_layout_and_ranks(tmp_path: Path):
    expected = {
        "the same": ("1.5e+03", "20"),
        "set by the user": ("0",),
        "another layout": (),
        "another mechanism": (),
        "fewer ranks before": (),
        "more ranks before": (),
    }
    assert run_ranks(kept_in_cases, RANKS, tmp_path) == [expected] * RANKS
