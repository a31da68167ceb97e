"""What stands in the way of a tape: a step on a CPU that is recorded once and replayed (memory/tape.py)."""

from __future__ import annotations

from dataclasses import replace

from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES
from moefold.config.run import Config

GRAPHS = "memory.graphs"
WHOLE, TAPED = "memory.graphs = whole", "memory.tape = true"  # as rules and a reader name the same thing
OF_A_GPU = "a whole graph is of bf16 on a GPU"


def tape_obstacles(config: Config, ranks: int) -> list[str]:
    """Why steps of this configuration are not recorded on a CPU. A tape is the graph of a whole step, so that rules of
    the one, but for the device, are rules of the other."""
    foreign = other_place(config, ranks)
    if foreign:
        return [foreign]
    obstacles: list[str] = []
    if config.observe.fault:
        obstacles.append("observe.fault: what is done to a step on purpose is not recorded")
    memory = replace(config.memory, graphs="whole")
    train = replace(config.train, device="cpu")
    case = ConfigOnRanks(replace(config, memory=memory, train=train), ranks)
    for rule in RULES:
        if GRAPHS in rule.reads and rule.name != OF_A_GPU and not rule.holds(case):
            obstacles.append(rule.says(case).replace(WHOLE, TAPED))
    return obstacles


def other_place(config: Config, ranks: int) -> str:
    """Why there is no tape whatever a step does; empty: there may be one."""
    if not config.memory.tape:
        return "memory.tape = false"
    if config.train.device == "cuda":
        return "train.device = cuda: a tape is of a step on a CPU"
    if ranks > 1:
        return f"a tape is of the step of a single rank, and this run has {ranks} ranks"
    return ""
