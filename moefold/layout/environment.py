"""Rank and rendezvous of this process, from the environment variables of its launcher. Torch-free.

One process, `moefold train --nproc 4`, torchrun and Slurm differ only in these variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from moefold.config.errors import UserError, printable_text

LAUNCHER_VARIABLE = "MOEFOLD_LAUNCHER"  # the process number of the launcher of --nproc
PARENT_VARIABLE = "MOEFOLD_PARENT"  # the process number of the starter that has forked this rank for its launcher
RANKS_FOLDER_VARIABLE = "MOEFOLD_RANKS"  # the launcher's folder of logs, where a rank leaves what is to be printed


@dataclass(frozen=True)
class Rendezvous:
    """This rank and the address where ranks meet. `attempt` counts restarts; with `agent` the launcher serves the
    store, the same one for all attempts."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "127.0.0.1"
    port: int = 29_500
    attempt: str = "0"
    agent: bool = False


def read_environment(env: Mapping[str, str]) -> Rendezvous:
    """Torchrun's variables, else Slurm's, else a single rank."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return read_torchrun(env)
    if "SLURM_PROCID" in env and environment_number(env, "SLURM_NTASKS", 1) > 1:
        return read_slurm(env)
    return Rendezvous()


def read_torchrun(env: Mapping[str, str]) -> Rendezvous:
    """Each of torchrun's agents counts its own restarts: on several nodes the numbers may differ. Where rank 0 serves
    the store every attempt has a new one, and the number is not needed."""
    rank = environment_number(env, "RANK")
    size = environment_number(env, "WORLD_SIZE")
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_counted = agent or "TORCHELASTIC_RUN_ID" not in env
    return Rendezvous(
        rank=rank,
        size=size,
        local_rank=environment_number(env, "LOCAL_RANK", rank),
        local_size=environment_number(env, "LOCAL_WORLD_SIZE", size),
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=environment_number(env, "MASTER_PORT", 29_500),
        attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0") if is_counted else "0",
        agent=agent,
    )


def read_slurm(env: Mapping[str, str]) -> Rendezvous:
    """Without MASTER_PORT the port follows from the job's number, so that jobs of one node do not collide."""
    job = environment_number(env, "SLURM_JOB_ID", 0)
    return Rendezvous(
        rank=environment_number(env, "SLURM_PROCID"),
        size=environment_number(env, "SLURM_NTASKS"),
        local_rank=environment_number(env, "SLURM_LOCALID", 0),
        local_size=slurm_tasks_on_node(env),
        host=env.get("MASTER_ADDR") or first_slurm_host(env),
        port=environment_number(env, "MASTER_PORT", 20_000 + job % 20_000),
        attempt=env.get("SLURM_RESTART_COUNT", "0"),
    )


def first_slurm_host(env: Mapping[str, str]) -> str:
    """`node[07-09,12]` -> `node07`; a plain list gives its first name."""
    nodes = "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            nodes = env[name]
            break
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to the first comma outside brackets
    first = match.group() if match else nodes
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def slurm_tasks_on_node(env: Mapping[str, str]) -> int:
    """`4(x2),3` -> 4."""
    tasks = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    first, *_ = re.split(r"[(,]", tasks)
    return environment_number({"SLURM_TASKS_PER_NODE": first}, "SLURM_TASKS_PER_NODE")


def launcher_pid(env: Mapping[str, str]) -> int | None:
    """The process that started this rank and waits for it: of `--nproc`, by its number; torchrun's agent, which is the
    parent. None for a process that was started by hand, whose parent may end before it."""
    if LAUNCHER_VARIABLE in env:
        return environment_number(env, LAUNCHER_VARIABLE)
    if "TORCHELASTIC_RUN_ID" in env:
        return os.getppid()
    return None


def parent_pid(env: Mapping[str, str]) -> int | None:
    """The process whose child this rank is as long as it has a launcher: that, or the starter between them."""
    if PARENT_VARIABLE in env:
        return environment_number(env, PARENT_VARIABLE)
    return launcher_pid(env)


def environment_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """An environment variable as a whole number; unset gives the default."""
    text = env.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UserError(f'the environment has {name} = "{printable_text(text)}"; expected a whole number, such as 1')
    return int(text)
