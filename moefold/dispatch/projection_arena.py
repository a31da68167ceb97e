"""Arenas of dense products inside exchanges, for a run's configuration: one for all layers of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moefold.comm.arena import HEADS, PROJECTIONS, Arena, ArenaUser, SharedArena
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.room_sizes import ProductRoom, head_room, projection_room
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.dispatch.tiled_heads import TiledHeads
from moefold.dispatch.tiled_projections import TiledProjections
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.exchanged_products import multiply_gathered
from moefold.kernels.linear.swapped_products import project_to_heads
from moefold.kernels.registry import KernelOp
from moefold.kernels.routing.arrival_pieces import PieceSignals
from moefold.layout.axes import Axis, World
from moefold.layout.dtypes import DTYPES


class SignallingArena(NamedTuple):
    """An arena, and the signals of kernels with their flags of one sender; without signals the references run."""

    arena: Arena
    signals: PieceSignals | None = None
    flags: int = 0


def build_tiled_projections(config: Config, kernels: BoundKernels, world: World) -> TiledProjections:
    """Every rank calls this; all succeed, or all of a tp axis raise the same error."""
    require_kernels(kernels, multiply_gathered, PROJECTIONS)
    opened = open_arena(config, world, PROJECTIONS, projection_room)
    return TiledProjections(opened.arena, kernels, opened.signals, opened.flags)


def build_tiled_heads(config: Config, kernels: BoundKernels, world: World) -> TiledHeads:
    """Every rank calls this; all succeed, or all of a cp axis raise the same error."""
    require_kernels(kernels, project_to_heads, HEADS)
    opened = open_arena(config, world, HEADS, head_room)
    return TiledHeads(opened.arena, kernels, opened.signals, opened.flags)


def open_arena(
    config: Config, world: World, user: ArenaUser, find_room: Callable[[Config, int], ProductRoom]
) -> SignallingArena:
    axis = world.axis(user.axes)
    require_one_machine(world, axis, user)
    number_bytes = DTYPES[config.train.precision].itemsize
    room = find_room(config, number_bytes)
    patience = config.train.slow_timeout
    if world.device.type == "cpu":
        return SignallingArena(SharedArena(axis, room.room_bytes, patience, user=user))
    memory = open_device_memory(axis, room.room_bytes, world.device, pieces=room.flags, user=user)
    arena = DeviceArena(axis, memory, patience)
    programs = torch.cuda.get_device_properties(world.device).multi_processor_count
    signals = signals_of_arena(arena, programs, config.parallel.tile_senders)
    return SignallingArena(arena, signals, room.flags)


def require_one_machine(world: World, axis: Axis, user: ArenaUser) -> None:
    nodes = {rank // world.node_size for rank in axis.ranks}
    if len(nodes) > 1:
        raise UserError(
            f"{user.setting} needs the ranks of {user.axes} on one machine, but these {axis.size} are on {len(nodes)}; "
            f"lower parallel.{user.axes}, or {user.instead}"
        )


def require_kernels(kernels: BoundKernels, op: KernelOp, user: ArenaUser) -> None:
    """On a GPU an arena is for kernels that signal; references exchange on CPUs alone."""
    if kernels.facts.device != "cpu" and kernels.implementation_name(op) == "reference":
        raise UserError(
            f"{user.setting} multiplies by kernels for bf16 on Hopper with Triton, which do not run here or are "
            f"forced away; install triton, or {user.instead}"
        )
