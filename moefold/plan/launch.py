"""Launch files of a planned run: its config.yaml, a torchrun line and a Slurm script.

All GPUs of a run are taken in whole nodes: of eight GPUs, or of four where NVLink joins several nodes to one domain.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from moefold.anatomy.regions import regions_of
from moefold.config.errors import UserError
from moefold.config.memory_regions import (
    OFFLOADED_REGIONS,
    REBUILT_REGIONS,
    entries_of_expert_weights,
    outermost_regions,
)
from moefold.config.read import config_as_yaml
from moefold.config.run import Config, ModelConfig
from moefold.plan.machine.gpu import Gpu
from moefold.plan.options import PlanChoices, parse_regions
from moefold.plan.request import PlanRequest

NODE_GPUS = 8
RACK_NODE_GPUS = 4  # of one node where a domain is larger than a node
RENDEZVOUS_PORT = 29500

LaunchFiles = dict[str, str]  # text by file name


def launch_files(r: PlanRequest, config: Config, choices: PlanChoices) -> LaunchFiles:
    node_gpus = min(r.gpus, gpus_of_node(r.gpu))
    nodes = math.ceil(r.gpus / node_gpus)
    run = planned_run(r, config, choices)
    return {
        "config.yaml": config_as_yaml(run),
        "torchrun.sh": torchrun_script(run, nodes, node_gpus),
        "run.sbatch": slurm_script(run, nodes, node_gpus),
    }


def gpus_of_node(gpu: Gpu) -> int:
    return NODE_GPUS if gpu.domain <= NODE_GPUS else RACK_NODE_GPUS


def planned_run(r: PlanRequest, config: Config, choices: PlanChoices) -> Config:
    """The configuration in the planned precision, with the planned recompute and graph, and with the steps of the token
    budget unless the request sets them."""
    config = with_planned_memory(config, choices)
    train = replace(config.train, precision=choices.precision)  # pyright: ignore[reportArgumentType]
    if "train.steps" not in r.fixed:
        step_tokens = train.global_batch * config.data.seq_len
        steps = math.ceil(r.tokens / step_tokens)
        train = replace(train, steps=steps)
    return replace(config, train=train)


def with_planned_memory(config: Config, choices: PlanChoices) -> Config:
    """The configuration of a run with the recompute, offload and graphs of the choices, by the trainer's names. Graphs
    of another trainer are not its own."""
    recompute = runnable_regions(config.model, choices.recompute, REBUILT_REGIONS)
    offload = runnable_regions(config.model, choices.offload, OFFLOADED_REGIONS)
    experts = entries_of_expert_weights(config.memory.offload)
    graphs = choices.graphs if choices.stack == "moefold" else "none"
    memory = replace(config.memory, recompute=recompute, offload=(*experts, *offload), graphs=graphs)
    return replace(config, memory=memory)


@lru_cache(maxsize=256)
def runnable_regions(model: ModelConfig, entries: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The regions of the entries that the model has. Entries for some layers stay as they are."""
    if any("@" in entry for entry in entries):
        return entries
    present = regions_of(model, {})
    wanted = parse_regions(entries)
    names = [name for name in known if name in wanted and name in present]
    return outermost_regions(names)


def train_command(run: Config) -> str:
    folder = shlex.quote(f"runs/{run.name}")
    return f"-m moefold train config.yaml --out {folder} --resume auto"


def torchrun_script(run: Config, nodes: int, node_gpus: int) -> str:
    """The torchrun line; with several nodes it is run once on each, and HEAD is the name of the first."""
    words = ["torchrun", f"--nproc-per-node {node_gpus}"]
    lines = ["#!/bin/sh"]
    if nodes > 1:
        lines.append(f"# on each of {nodes} nodes, with HEAD=name of the first")
        words += [f"--nnodes {nodes}", "--rdzv-backend c10d", f'--rdzv-endpoint "$HEAD:{RENDEZVOUS_PORT}"']
    words.append(train_command(run))
    lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


def slurm_script(run: Config, nodes: int, node_gpus: int) -> str:
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={run.name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks-per-node={node_gpus}",
        f"#SBATCH --gpus-per-node={node_gpus}",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        f"srun python {train_command(run)}",
    ]
    return "\n".join(lines) + "\n"


def write_launch_files(folder: Path, files: LaunchFiles) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in files if (folder / name).exists()]
    if taken:
        found = f"{folder} has {', '.join(taken)} already"
        raise UserError(f"{found}; expected a folder without them; choose another --write or remove them")
    for name, text in files.items():
        (folder / name).write_text(text)
