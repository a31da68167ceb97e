"""Saves take whole files' worth of host memory where the machine has room for that, and else a window."""

from __future__ import annotations

import pytest

from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import MachineMemory
from moefold.plan.memory.machine_fit import MachineFit, ranks_of_machine
from moefold.plan.memory.run_setting import GIB
from moefold.plan.memory.save_window import WINDOW_GIB, bounded_saves
from moefold.presets.recipe import resolve_recipe

LEAN = [
    *("--optim.main", "none", "--optim.moments", "int8", "--optim.gradients", "bf16", "--optim.when", "backward"),
    *("--optim.clip_by", "previous", "--train.global_batch", "4", "--train.micro_batch", "4"),
    *("--data.seq_len", "4096", "--memory.recompute", "layer", "--train.device", "cuda", "--train.precision", "bf16"),
]


def fit_on(host_gib: float, *words: str) -> MachineFit:
    place = ranks_of_machine(Rendezvous(size=1, local_size=1))
    machine = MachineMemory((140 * GIB,), int(host_gib * GIB))
    return MachineFit(resolve_recipe("qwen3-30b-a3b", [*LEAN, *words], 1), place, machine)


def test_thirty_billion_parameters_are_saved_through_a_window_where_their_file_has_no_room():
    whole = fit_on(128)
    assert whole.saved_bytes(whole.local_ranks(0)) == pytest.approx(305e9, rel=0.01)
    shortage = whole.first_shortage()
    assert shortage is not None
    assert shortage.memory == "host memory"
    bounded = bounded_saves(whole)
    assert bounded.config.checkpoint.host_gib == WINDOW_GIB
    assert bounded.first_shortage() is None
    assert bounded.checkpoint_bytes(bounded.local_ranks(0)) == WINDOW_GIB * GIB


@pytest.mark.parametrize(
    ("host", "words"),
    [(400, []), (128, ["--checkpoint.every", "0"]), (128, ["--checkpoint.host_gib", "5"])],
    ids=["room", "no checkpoints", "set"],
)
def test_nothing_is_chosen_where_whole_files_have_room_or_a_window_is_set(host: int, words: list[str]):
    fit = fit_on(host, *words)
    assert bounded_saves(fit) == fit
    assert fit.first_shortage() is None


def test_a_machine_that_the_file_would_fill_to_the_brim_has_no_room_for_it():
    """A plan leaves out the process itself."""
    fit = fit_on(300)
    assert fit.first_shortage() is None
    assert bounded_saves(fit) != fit


def test_checkpoints_in_memory_are_whole_whatever_the_window():
    fit = bounded_saves(fit_on(128, "--checkpoint.memory_every", "2"))
    assert fit.config.checkpoint.host_gib == WINDOW_GIB
    assert fit.checkpoint_bytes(fit.local_ranks(0)) > 3 * 305e9
    assert fit.first_shortage() is not None


def test_states_on_the_host_are_saved_as_those_on_a_device():
    saved = [
        fit.saved_bytes(fit.local_ranks(0))
        for fit in (fit_on(128, "--optim.when", "step", "--optim.states", where) for where in ("device", "host"))
    ]
    assert saved[0] == saved[1] > 0
