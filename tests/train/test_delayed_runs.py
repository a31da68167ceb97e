"""Whole runs with delayed FP8 scales: near current scales, resumed to the bit, agreed over ranks and layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefold.checkpoint.live.logical_tensors import as_tensor_part
from moefold.layout.axes import World, single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run, run_tensors
from tests.support.ranks import run_ranks
from tests.train.test_fp8_runs import SMALL, counting_corpus, losses_of

SMALLER = ["--model.layers", "1", "--model.hidden", "32", "--data.seq_len", "32", "--train.global_batch", "2"]
DELAYED = ["--precision.scaling", "delayed", "--precision.history", "3"]
ONE_FUNCTION = ["--model.moe.ffn", "128"]  # experts need an inner width of whole blocks for it
NEAR = 0.03
Histories = dict[str, torch.Tensor]


def make_run(folder: Path, recipe: str, *more: str, world: World | None = None) -> Run:
    world = world or single_rank_world("cpu")
    words = [*SMALL, *SMALLER, "--train.micro_batch", "1", "--precision.recipe", recipe, *more]
    config = resolve_recipe("tiny", words, world.size)
    return assemble_run(config, world, folder, counting_corpus())


def histories(run: Run) -> dict[str, tuple[object, torch.Tensor]]:
    """Box and values of everything that the recipes of this rank keep."""
    found: dict[str, tuple[object, torch.Tensor]] = {}
    for name, tensor in run_tensors(run).items():
        if name.startswith("precision."):
            (held,) = as_tensor_part(tensor).held
            found[name] = held.box, held.read().clone()
    return found


def test_frozen_layers_without_a_backward_go_on_recording_what_they_read(tmp_path: Path):
    """Their activations' scales come from the last steps as those of other layers do."""
    frozen = ["--optim.groups", "embedding.*: frozen, blocks.0.*: frozen", "--model.layers", "2"]
    run = make_run(tmp_path, "fp8_tensor", *DELAYED, *ONE_FUNCTION, *frozen)
    losses_of(run, 5)
    kept = {name: values for name, (_, values) in histories(run).items() if name.endswith("down_product.input_maxima")}
    assert len(kept) == 2
    for name, values in kept.items():
        assert values.shape[0] == 3, name
        assert (values.amax(dim=tuple(range(1, values.dim()))) > 0).all(), name


@pytest.mark.parametrize(("recipe", "experts"), [("fp8_tensor", []), ("fp8_row", ONE_FUNCTION)])
def test_losses_are_near_those_of_current_scales_and_a_resumed_run_has_the_same(
    recipe: str, experts: list[str], tmp_path: Path
):
    run = make_run(tmp_path, recipe, *DELAYED, *experts)
    current = make_run(tmp_path / "current", recipe, *experts)
    with make_background_saver(run, print) as saver:
        first = losses_of(run, 2)
        begin_checkpoint(run, saver)
    saved = histories(run)
    losses = first + losses_of(run, 3)
    right = losses_of(current, 5)
    assert losses[0] == right[0], "no step was recorded yet"
    assert losses[1:] != right[1:]
    assert all(abs(mine - other) < NEAR * other for mine, other in zip(losses, right, strict=True))
    resumed = make_run(tmp_path, recipe, *DELAYED, *experts)
    assert resume_run(resumed, str(tmp_path / "checkpoints"), print)
    assert_equal_histories(histories(resumed), saved)
    assert losses_of(resumed, 3) == losses[2:]
    assert_equal_histories(histories(resumed), histories(run))
    # The other way round: what the checkpoint lacks or has in another shape begins empty, what the run lacks is left.
    other = make_run(tmp_path / "other", recipe, *DELAYED[:2], "--precision.history", "5", *experts)
    assert resume_run(other, str(tmp_path / "checkpoints"), print)
    assert not any(values.any() for name, (_, values) in histories(other).items() if "saturated" not in name)
    assert resume_run(current, str(tmp_path / "checkpoints"), print)


def assert_equal_histories(mine: dict[str, tuple[object, torch.Tensor]], right: dict[str, tuple[object, torch.Tensor]]):
    assert mine.keys() == right.keys()
    assert len(mine) > 10
    for name, (box, values) in mine.items():
        assert box == right[name][0]
        assert torch.equal(values, right[name][1]), name


def train_on_rank(world: World, folder: str, recipe: str, words: list[str]) -> dict[str, tuple[object, torch.Tensor]]:
    run = make_run(Path(folder), recipe, *DELAYED, *words, world=world)
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    return histories(run)


def test_data_parallel_ranks_have_the_history_of_one_rank(tmp_path: Path):
    alone = make_run(tmp_path / "alone", "fp8_row", *DELAYED)
    losses_of(alone, 2)
    for found in run_ranks(train_on_rank, 2, str(tmp_path), "fp8_row", []):
        assert_equal_histories(found, histories(alone))


def test_expert_parallel_ranks_agree_and_one_rank_goes_on_with_their_histories(tmp_path: Path):
    words = ["--parallel.ep", "2"]
    ranks = run_ranks(train_on_rank, 2, str(tmp_path), "fp8_row", words, ep=2)
    alone = make_run(tmp_path, "fp8_row", *DELAYED)
    assert resume_run(alone, str(tmp_path / "checkpoints"), print)
    whole = histories(alone)
    cut: set[str] = set()
    for found in ranks:
        assert found.keys() == whole.keys()
        for name, (box, values) in found.items():
            assert values.any() or "saturated" in name
            starts_and_sizes = [slice(start, start + size) for start, size in box]  # pyright: ignore[reportGeneralTypeIssues]
            assert torch.equal(values, whole[name][1][tuple(starts_and_sizes)]), name
            if values.shape != whole[name][1].shape:
                cut.add(name.rpartition("experts.")[2])
    of_channels = ("up_product.gradient", "down_product.input", "down_product.gradient")
    assert cut == {f"{operand}_channel_maxima" for operand in of_channels}
