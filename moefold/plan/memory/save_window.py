"""The host memory of saves: whole files where the machine has room for them, else a window that they pass through in
pieces. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.run import Config
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import this_machine
from moefold.plan.memory.machine_fit import MachineFit, ranks_of_machine

WINDOW_GIB = 2.0  # of a machine
USABLE_SHARE = 0.8  # of a memory, for what is chosen: a plan leaves out the process itself and unused allocations


def with_save_window(config: Config, place: Rendezvous) -> Config:
    """The configuration with what `checkpoint.host_gib` leaves open, chosen for the machine of this process."""
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return config  # the planner does not know the memory of another package's attention
    fit = MachineFit(config, ranks_of_machine(place), this_machine())
    return bounded_saves(fit).config


def bounded_saves(fit: MachineFit) -> MachineFit:
    """The run with a window for its saves, where nothing is set and whole files have no room beside it."""
    checkpoint = fit.config.checkpoint
    if not checkpoint.every or checkpoint.host_gib or has_room(fit):
        return fit
    bounded = replace(checkpoint, host_gib=WINDOW_GIB)
    return replace(fit, config=replace(fit.config, checkpoint=bounded))


def has_room(fit: MachineFit) -> bool:
    """Whether the host memory of this machine has room for the run and for whole files."""
    there = fit.machine.host
    if there is None:
        return True
    local = fit.local_ranks(fit.ranks.first)
    return fit.host_needs(local).bytes <= USABLE_SHARE * there
