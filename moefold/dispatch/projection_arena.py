"""The arena of projections inside exchanges, for a run's configuration: one for all layers of a rank."""

from __future__ import annotations

import torch

from moefold.comm.arena import PROJECTIONS, SharedArena
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.room_sizes import projection_room
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.dispatch.tiled_projections import TiledProjections
from moefold.kernels.bound import BoundKernels
from moefold.kernels.linear.exchanged_products import multiply_gathered
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES


def build_tiled_projections(config: Config, kernels: BoundKernels, world: World) -> TiledProjections:
    """Every rank calls this; all succeed, or all of a tp axis raise the same error."""
    require_one_machine(world)
    tp = world.axis("tp")
    dtype = DTYPES[config.train.precision]
    room = projection_room(config, dtype.itemsize)
    patience = config.train.slow_timeout
    if world.device.type == "cpu":
        shared = SharedArena(tp, room.room_bytes, patience, user=PROJECTIONS)
        return TiledProjections(shared, kernels)
    require_kernels(kernels)
    memory = open_device_memory(tp, room.room_bytes, world.device, pieces=room.flags, user=PROJECTIONS)
    arena = DeviceArena(tp, memory, patience)
    programs = torch.cuda.get_device_properties(world.device).multi_processor_count
    signals = signals_of_arena(arena, programs, config.parallel.tile_senders)
    return TiledProjections(arena, kernels, signals, room.flags)


def require_one_machine(world: World) -> None:
    tp = world.axis("tp")
    nodes = {rank // world.node_size for rank in tp.ranks}
    if len(nodes) > 1:
        raise UserError(
            f"{PROJECTIONS.setting} needs the ranks of tp on one machine, but these {tp.size} are on {len(nodes)}; "
            f"lower parallel.tp, or {PROJECTIONS.instead}"
        )


def require_kernels(kernels: BoundKernels) -> None:
    if kernels.implementation_name(multiply_gathered) == "reference":
        raise UserError(
            f"{PROJECTIONS.setting} multiplies by kernels for bf16 on Hopper with Triton, which do not run here or are "
            f"forced away; install triton, or {PROJECTIONS.instead}"
        )
