"""The post-mortem of a run that ran out of memory: what held memory, by kind of tensor and by region, and which keys
help. What torch counted on the device is measured; kinds and regions are the planner's."""

from __future__ import annotations

from moefold.cli.memory_errors import OUT_OF_MEMORY, memory_problem
from moefold.config.errors import UserError
from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.run import Config
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import this_machine
from moefold.plan.memory.fit_proposals import propose_changes
from moefold.plan.memory.machine_fit import MachineFit, choices_of_run, list_parts, ranks_of_machine
from moefold.plan.memory.peak_memory import fullest_rank, plan_memory
from moefold.plan.memory.region_savings import saved_by_regions
from moefold.plan.memory.run_setting import GIB

SHOWN_REGIONS = 4


class OutOfMemory(UserError):
    """A run that ended for want of memory."""

    exit_code = OUT_OF_MEMORY

    def __init__(self, config: Config, place: Rendezvous, error: BaseException):
        lines = [memory_problem(error), *device_lines()]
        if config.model.attention.kind in ATTENTION_NAMES.builtin:
            lines += planned_lines(config, place)
        super().__init__(*lines)


def device_lines() -> list[str]:
    """What torch has on the device; nothing on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    free, total = torch.cuda.mem_get_info()
    tensors = torch.cuda.memory_allocated() / GIB
    peak = torch.cuda.max_memory_allocated() / GIB
    cached = torch.cuda.memory_reserved() / GIB - tensors
    card = f"of {total / GIB:,.1f} GiB {free / GIB:,.1f} are free"
    return [f"on the device: {card}; tensors {tensors:,.1f} GiB (peak {peak:,.1f}), unused pieces {cached:,.1f} GiB"]


def planned_lines(config: Config, place: Rendezvous) -> list[str]:
    """The planner's account of the fullest rank, and what would make the run fit."""
    choices = choices_of_run(config)
    rank = fullest_rank(plan_memory(config, place.size, choices))
    lines = [f"planned, GiB at the peak ({rank.at}): {list_parts([rank])}"]
    regions = saved_by_regions(config, place.size, choices)
    largest = sorted(regions.items(), key=lambda item: -item[1])[:SHOWN_REGIONS]
    held = [f"{name} {size / GIB:,.2f}" for name, size in largest if size > 0]
    if held:
        lines.append(f"activations of a microbatch by region, GiB, overlapping: {', '.join(held)}")
    fit = MachineFit(config, ranks_of_machine(place), this_machine())
    proposals = propose_changes(fit)
    helps = "; ".join(proposals) or "--memory.recompute, --memory.offload, a smaller --train.micro_batch or model"
    lines.append(f"what helps, each alone: {helps}")
    return lines
