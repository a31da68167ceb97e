"""A step that is not finite is traced to its first bad value, and the trace leaves the run as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moefold.config.errors import UserError
from moefold.config.run import MoeConfig
from moefold.layout.axes import World, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.non_finite import NonFiniteStep, refuse_non_finite
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.step import take_next_step
from moefold.train.step_trace import trace_step
from tests.support.damaged_runs import damaged_config, damaged_run, is_traced, traced_faults
from tests.support.ranks import run_ranks
from tests.train.test_step import everything

# Attention over two ranks, experts over two, two copies of each.
FAULTS = [
    "nan weight=blocks.0.moe.experts.down expert=1 rank=0 step=2",
    "nan gradient=blocks.1.moe.experts.gate_up expert=7 rank=3 step=2",
    "nan output=experts layer=1 rank=2 step=2",
    "inf output=attend layer=0 rank=1 step=2",
]
# All layers on the first pipeline rank, the head alone on the second.
PIPELINE_FAULTS = ["nan output=attend layer=1 rank=1 step=2", "nan output=predict rank=2 step=2"]


def run_of(preset: str, fault: str = "", **moe: object) -> Run:
    config = shrink_config(PRESETS[preset](), 1)
    config = replace(config, observe=replace(config.observe, fault=fault))
    changed: MoeConfig = replace(config.model.moe, **moe)
    config = replace(config, model=replace(config.model, moe=changed))
    return assemble_run(config, single_rank_world(), Path("/nowhere"), random_corpus(config))


def state_of(run: Run) -> list[torch.Tensor]:
    """All that a later step depends on, and all that a report shows."""
    loads = [torch.tensor([load.moved, *load.counts_E.tolist()]) for load in run.model.loads()]
    place = torch.tensor([run.step, run.loader.consumed])
    return [*everything(run), *loads, place, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("layout", "faults"), [({"tp": 2, "ep": 2}, FAULTS), ({"pp": 2, "ep": 2}, PIPELINE_FAULTS)], ids=["tp ep", "pp ep"]
)
def test_on_four_ranks_a_bad_value_is_traced_to_layer_expert_tensor_and_rank(layout: dict[str, int], faults: list[str]):
    by_rank = run_ranks(traced_faults, 4, layout, faults, **layout)
    assert all(places == by_rank[0] for places in by_rank)
    for fault, place in zip(faults, by_rank[0], strict=True):
        assert is_traced(fault, place), (fault, place)
        assert place["value"] == ("Inf" if fault.startswith("inf") else "NaN")


@pytest.mark.extended
def test_a_bad_value_of_any_row_chunk_is_traced_to_its_step():
    """An expert without rows in the first chunks has its bad value in a later one."""
    faults = [f"nan output=experts layer=0 expert={expert} rank=1 step=1" for expert in (4, 6)]
    layout = {"ep": 2, "row_chunks": 8}
    for places in run_ranks(traced_faults, 4, layout, faults, ep=2):
        for fault, place in zip(faults, places, strict=True):
            assert place is not None
            assert f" expert={place['expert']} " in fault
            assert (place["step"], place["layer"], place["rank"]) == ("experts", 0, 1)


@pytest.mark.parametrize("place", ["mean", "mean_square"])
def test_bad_optimizer_state_is_named_and_not_the_weight_that_it_made(place: str):
    run = run_of("tiny", f"nan {place}=blocks.1.attention.out.weight rank=0 step=1")
    refuse_non_finite(run, take_next_step(run))
    with pytest.raises(NonFiniteStep, match=f"NaN in {place} blocks.1.attention.out.weight, layer 1, rank 0"):
        refuse_non_finite(run, take_next_step(run))


@pytest.mark.parametrize("preset", ["tiny", "deepseek-v3"])
def test_a_trace_changes_nothing_and_a_sound_step_has_no_bad_value(preset: str):
    run = run_of(preset)
    take_next_step(run)
    take_next_step(run)
    before = state_of(run)
    assert trace_step(run, 2) is None
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(run), strict=True))
    twin = run_of(preset)
    expected = [take_next_step(twin).loss for _ in range(3)][-1]
    assert take_next_step(run).loss == expected


def test_a_fault_that_has_passed_is_said_to_have_passed_with_the_ranks_whose_losses_were_bad():
    run = run_of("tiny")
    hook = run.model.head.norm.register_forward_hook(lambda *found: tuple(x * torch.nan for x in found[-1]))
    report = take_next_step(run)
    hook.remove()
    with pytest.raises(NonFiniteStep, match=r"run again, the step is finite: a passing fault.*bad on ranks 0"):
        refuse_non_finite(run, report)


def spoil_sequence(run: Run, marked: torch.Tensor) -> None:
    """Wherever these tokens are computed, on any rank, their embedding is no number."""

    def spoil(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        has_marked = (inputs[0].view(-1, len(marked)) == marked).all(1).any()
        return output * torch.nan if has_marked else output

    run.model.embedding.register_forward_hook(spoil)


def suspects(world: World, parallel: dict[str, int], faults: list[str]) -> list[str | None]:
    """What is suspect in runs with these faults; a number: a spoiled sequence of the second step."""
    found: list[str | None] = []
    for fault in faults:
        is_data = fault.isdigit()
        run = damaged_run(world, damaged_config(parallel, "" if is_data else fault))
        refuse_non_finite(run, take_next_step(run))
        if is_data:
            marked = run.loader.sequences.arrays(run.loader.batch + int(fault)).tokens
            spoil_sequence(run, torch.from_numpy(marked))
        with pytest.raises(NonFiniteStep) as stopped:
            refuse_non_finite(run, take_next_step(run))
        assert (f"stays on rank {fault.split('rank=')[-1][0]}" in str(stopped.value)) == (not is_data)
        found.append(stopped.value.record["suspect"])
    return found


@pytest.mark.extended
def test_run_again_on_other_ranks_a_bad_value_stays_with_its_device_or_moves_with_its_data():
    faults = ["nan output=experts layer=1 rank=2 step=2", "nan output=attend layer=0 rank=1 step=2", "0", "5"]
    expected = ["device", "device", "data", "data"]
    assert run_ranks(suspects, 4, {"ep": 2}, faults, ep=2) == [expected] * 4


def test_a_fault_in_what_a_rank_does_not_hold_is_refused():
    run = run_of("tiny", "nan weight=blocks.9.attention.out.weight rank=0 step=1")
    with pytest.raises(UserError, match=r"damages weight of blocks.9.attention.out.weight on rank 0, which does not"):
        take_next_step(run)
