"""Runs on real ranks that are damaged on purpose (`observe.fault`), and what they say of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from moefold.config.run import Config, ParallelConfig
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.finite_checks import expert_of_element
from moefold.train.non_finite import NonFiniteStep, refuse_non_finite
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.replica_check import ReplicasDiffer, compare_replicas
from moefold.train.step import take_next_step

RANKS = 4
LAYOUTS: list[dict[str, int]] = [{}, {"ep": 2}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 2}]
STEPS = 5
DAMAGED_STEP = 2
OUTPUTS = ("attend", "route", "experts", "combine")


class Held(NamedTuple):
    """A tensor of a rank: `kind` is weight or that of optimizer state; `expert` is one that the rank has of it."""

    kind: str
    name: str
    expert: int | None


def damaged_config(parallel: dict[str, int], fault: str = "", compare_every: int = 0) -> Config:
    config = shrink_config(replace(PRESETS["tiny"](), parallel=ParallelConfig(**parallel)), RANKS)
    observe = replace(config.observe, fault=fault, compare_every=compare_every)
    return replace(config, observe=observe)


def damaged_run(world: World, config: Config) -> Run:
    return assemble_run(config, world, Path("/nowhere"), random_corpus(config))


def held_tensors(world: World, parallel: dict[str, int]) -> list[Held]:
    """What this rank has that can be damaged."""
    run = damaged_run(world, damaged_config(parallel))
    held = [Held("weight", p.name, expert_of_element(p, p.tensor.numel() - 1)) for p in declared_parameters(run.model)]
    for parameter, kind, first, values in run.optimizer.state():
        if len(values):
            held.append(Held(kind, parameter.name, expert_of_element(parameter, first)))
    return held


def traced_faults(world: World, parallel: dict[str, int], faults: list[str]) -> list[dict[str, Any] | None]:
    """Where the first bad value was of runs with these faults; None where no step was stopped."""
    return [traced_fault(world, parallel, fault) for fault in faults]


def traced_fault(world: World, parallel: dict[str, int], fault: str) -> dict[str, Any] | None:
    run = damaged_run(world, damaged_config(parallel, fault))
    for _ in range(STEPS):
        report = take_next_step(run)
        try:
            refuse_non_finite(run, report)
        except NonFiniteStep as stopped:
            return stopped.record["place"]
    return None


def found_flip(world: World, fault: str, every: int, parallel: dict[str, int]) -> dict[str, Any] | None:
    """What a run of replicas that are compared every few steps says of a flipped bit."""
    run = damaged_run(world, damaged_config(parallel, fault, every))
    try:
        for _ in range(2 * every):
            refuse_non_finite(run, take_next_step(run))
            if run.step % every == 0:
                compare_replicas(run)
    except ReplicasDiffer as stopped:
        return stopped.record
    return None


def found_flips(
    world: World, faults: list[str], every: int, parallel: dict[str, int] | None = None
) -> list[dict[str, Any] | None]:
    return [found_flip(world, fault, every, parallel or {}) for fault in faults]


def draw_flip(chance: random.Random, held: list[list[Held]], every: int) -> str:
    rank = chance.randrange(len(held))
    tensor = chance.choice([tensor for tensor in held[rank] if tensor.kind == "weight"])
    return f"flip weight={tensor.name} bit={chance.randrange(32)} rank={rank} step={chance.randint(1, 2 * every)}"


def is_named(fault: str, every: int, record: dict[str, Any] | None) -> bool:
    """Whether the rank is named, no later than at the next comparison."""
    said = dict(word.split("=") for word in fault.split()[1:])
    step = int(said["step"])
    last = -(-step // every) * every
    return record is not None and record["ranks"] == [int(said["rank"])] and step <= record["step"] <= last


def draw_fault(chance: random.Random, kind: str, layout: dict[str, int], held: list[list[Held]]) -> str:
    """A random fault of a kind that a rank has the tensor for."""
    rank = chance.randrange(RANKS)
    where = f"rank={rank} step={DAMAGED_STEP}"
    if kind == "output":
        layers = sorted({int(t.name.split(".")[1]) for t in held[rank] if ".moe." in t.name})
        if not layers:  # a pipeline rank with the head alone
            return f"nan output=predict {where}"
        return f"nan output={chance.choice(OUTPUTS)} layer={chance.choice(layers)} {where}"
    wanted = "weight" if kind == "gradient" else kind
    tensor = chance.choice(
        [tensor for tensor in held[rank] if tensor.kind == wanted and tensor.name != "embedding.weight"]
    )
    expert = "" if tensor.expert is None else f" expert={tensor.expert}"
    return f"nan {kind}={tensor.name}{expert} {where}"


def is_traced(fault: str, place: dict[str, Any] | None) -> bool:
    """Whether the place is that of the fault."""
    _, damaged, *words = fault.split()
    kind, name = damaged.split("=")
    said = dict(word.split("=") for word in words)
    if place is None or place["kind"] != kind or place["rank"] != int(said["rank"]):
        return False
    if kind == "output":
        return place["step"] == name and in_words(place["layer"]) == said.get("layer")
    return place["tensor"] == name and in_words(place["expert"]) == said.get("expert")


def in_words(number: int | None) -> str | None:
    return None if number is None else str(number)
