"""States that match by kind are taken over by other rules, others begin anew with their own count of updates, and what
is missing otherwise is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moefold.checkpoint.format.retention import RetentionPolicy, step_folder_name
from moefold.checkpoint.live.save import save_checkpoint
from moefold.config.errors import UserError
from moefold.config.run import OptimConfig
from moefold.layout.axes import single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.train.assemble import Run, assemble_run
from moefold.train.changed_settings import flat_settings
from moefold.train.parity import random_corpus
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run, run_tensors
from moefold.train.step import train_step
from tests.train.test_resume import START

STEPS = 2  # before the change
PLAIN = OptimConfig(warmup=0, lr=1e-2, eps=1e-3, decay="constant")
ADAMW = PLAIN
MUON = replace(PLAIN, rule="muon")
FROZEN = replace(PLAIN, groups=("blocks.0.*: frozen", "embedding.*: frozen"))
SOME_MUON = replace(PLAIN, groups=("*.experts.*: rule=muon", "head.weight: rule=muon"))

State = dict[str, Tensor]


def run_with(optim: OptimConfig, folder: Path, precision: str = "fp64") -> Run:
    train = replace(START.train, precision=precision)  # pyright: ignore[reportArgumentType]
    config = replace(START, optim=optim, train=train)
    return assemble_run(config, single_rank_world(), folder, random_corpus(config))


def step(run: Run) -> None:
    train_step(run, run.loader.next_batch())


def save(run: Run) -> Path:
    saver = make_background_saver(run, str)
    begin_checkpoint(run, saver)
    saver.wait_until_written()
    return run.out / "checkpoints" / step_folder_name(run.step)


def trained(optim: OptimConfig, folder: Path, precision: str = "fp64") -> Run:
    run = run_with(optim, folder, precision)
    for _ in range(STEPS):
        step(run)
    return run


def states(run: Run) -> dict[str, State]:
    """Copies of the rules' states by parameter and kind; every rank has them whole."""
    found: dict[str, State] = {}
    for parameter, kind, _, values in run.optimizer.state():
        assert isinstance(values, Tensor)
        found.setdefault(parameter.name, {})[kind] = values.clone()
    return found


def weights(run: Run) -> State:
    return {p.name: p.tensor.detach().clone() for p in declared_parameters(run.model)}


CHANGES = [(ADAMW, MUON), (MUON, ADAMW), (FROZEN, ADAMW), (ADAMW, FROZEN), (SOME_MUON, ADAMW), (ADAMW, SOME_MUON)]
CHANGE_NAMES = ["to muon", "to adamw", "to trained", "to frozen", "some to adamw", "some to muon"]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=CHANGE_NAMES)
def test_states_that_match_are_taken_over_and_the_others_are_those_of_a_new_run(
    before: OptimConfig, after: OptimConfig, tmp_path: Path
):
    """The first updates are AdamW's formula with the updates since each state began, and the rest that of a run whose
    weights and states were put there by hand."""
    first = trained(before, tmp_path / "first")
    saved = states(first)
    resumed = run_with(after, tmp_path / "resumed")
    said: list[str] = []
    assert resume_run(resumed, str(save(first)), said.append)
    begun = states(resumed)
    new = {name for name, kinds in begun.items() if saved.get(name, {}).keys() != kinds.keys()}
    for name, kinds in begun.items():
        for kind, values in kinds.items():
            expected = torch.zeros_like(values) if name in new else saved[name][kind]
            assert torch.equal(values, expected), f"{name} {kind}"
    assert any(note.startswith("note: new states") and f"{len(new)} parameters" in note for note in said) == bool(new)
    by_hand = put_by_hand(first, run_with(after, tmp_path / "by hand"), begun, new)
    old_weights = weights(resumed)
    step(resumed)
    require_formula(resumed, old_weights, new)
    step(resumed)
    for _ in range(2):
        step(by_hand)
    found = weights(resumed)
    for name, expected in weights(by_hand).items():
        assert torch.equal(found[name], expected), name


def put_by_hand(first: Run, run: Run, begun: dict[str, State], new: set[str]) -> Run:
    run.model.load_state_dict(first.model.state_dict())
    for parameter, kind, _, values in run.optimizer.state():
        assert isinstance(values, Tensor)
        values.copy_(begun[parameter.name][kind])
    run.optimizer.note_begins(dict.fromkeys(new, STEPS))
    run.step = first.step
    run.loader.consumed = first.loader.consumed
    return run


def require_formula(run: Run, old_weights: State, new: set[str]) -> None:
    """w - lr decay w - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps), by the moments behind the update."""
    optim = run.config.optim
    parameters = {parameter.name: parameter for parameter in declared_parameters(run.model)}
    for name, kinds in states(run).items():
        if "mean" not in kinds:
            continue
        parameter = parameters[name]
        t = 1 if name in new else STEPS + 1
        mean = kinds["mean"] / (1 - optim.beta1**t)
        square = kinds["mean_square"] / (1 - optim.beta2**t)
        decay = optim.weight_decay if parameter.declaration.decays else 0.0
        old = old_weights[name].flatten()
        expected = old - optim.lr * decay * old - optim.lr * mean / (square.sqrt() + optim.eps)
        torch.testing.assert_close(parameter.tensor.detach().flatten(), expected, rtol=1e-12, atol=1e-14)


def test_counts_of_updates_go_on_in_the_next_checkpoint(tmp_path: Path):
    changed = run_with(ADAMW, tmp_path / "changed")
    assert resume_run(changed, str(save(trained(MUON, tmp_path / "first"))), str)
    step(changed)
    path = save(changed)
    counts = json.loads((path / "state.json").read_text())["begun_after"]
    assert counts == dict.fromkeys(counts, STEPS)
    assert "blocks.0.attention.out.weight" in counts
    assert "embedding.weight" not in counts
    again = run_with(ADAMW, tmp_path / "again")
    said: list[str] = []
    assert resume_run(again, str(path), said.append)
    assert not any("states" in note for note in said)
    for run in (changed, again):
        step(run)
    for name, expected in weights(changed).items():
        assert torch.equal(weights(again)[name], expected), name


def test_parameters_that_are_trained_again_begin_from_their_weights(tmp_path: Path):
    """In bf16: a frozen parameter has no main weight."""
    first = trained(FROZEN, tmp_path / "first", "bf16")
    resumed = run_with(ADAMW, tmp_path / "resumed", "bf16")
    assert resume_run(resumed, str(save(first)), str)
    main = states(resumed)["embedding.weight"]["main"]
    assert torch.equal(main, weights(first)["embedding.weight"].flatten().float())


def save_without(missing: str, run: Run, folder: Path) -> str:
    tensors = {name: tensor for name, tensor in run_tensors(run).items() if name != missing}
    state = {"step": run.step, "consumed": run.loader.consumed, "config": flat_settings(run.config)}
    path = save_checkpoint(folder, run.step, tensors, state, RetentionPolicy(1), single_rank_world())
    return str(path)


@pytest.mark.parametrize(
    ("missing", "after"), [("optimizer.head.weight.mean", ADAMW), ("model.head.weight", MUON)], ids=["state", "weight"]
)
def test_a_missing_weight_and_a_state_missing_without_a_change_of_rules_are_refused(
    missing: str, after: OptimConfig, tmp_path: Path
):
    path = save_without(missing, trained(ADAMW, tmp_path / "first"), tmp_path / "saved")
    resumed = run_with(after, tmp_path / "resumed")
    with pytest.raises(UserError) as refused:
        resume_run(resumed, path, str)
    assert f'"{missing}" is not in the checkpoint' in str(refused.value)


def test_moments_of_one_parameter_begin_together(tmp_path: Path):
    path = save_without("optimizer.head.weight.mean", trained(ADAMW, tmp_path / "first"), tmp_path / "saved")
    resumed = run_with(MUON, tmp_path / "resumed")
    said: list[str] = []
    assert resume_run(resumed, path, said.append)
    assert not states(resumed)["head.weight"]["mean_square"].any()
    assert resumed.optimizer.begun_after["head.weight"] == STEPS
    assert any("mean, mean_square" in note and note.endswith("one parameter: head.weight") for note in said)
