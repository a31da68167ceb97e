"""Builders of dispatchers by name: code attached to the names of config/open_names.py, and the choice for a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.announced_choices import blocks_of_tokens
from moefold.anatomy.step_specs import dispatched_width
from moefold.comm.arena import Arena, SharedArena
from moefold.config.errors import UserError, one_of
from moefold.config.extensions import find_extension
from moefold.config.run import Config, MoeConfig, ParallelConfig, PrecisionConfig
from moefold.dispatch.all_gather import AllGatherDispatcher
from moefold.dispatch.base import Dispatcher, Hop, RowPolicy
from moefold.dispatch.clone_rows import placement_with_slots
from moefold.dispatch.cloning_dispatcher import CloningDispatcher
from moefold.dispatch.deepep import DeepEpHop, make_deepep_buffer, require_deepep
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.expert_placement import ExpertPlacement, contiguous_placement
from moefold.dispatch.fp8_dispatcher import Fp8Dispatcher, SendsRows, gradient_rule, token_rule
from moefold.dispatch.hop import AllToAllHop, pack_for_everyone, pack_per_choice, pack_per_rank
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.measure_links import measure_links
from moefold.dispatch.price import cheapest_dispatcher
from moefold.dispatch.room_sizes import (
    AnnouncedSizes,
    ArenaRows,
    arena_rows,
    bounded_rows,
    kept_rooms,
    most_choices,
    room_bytes,
    row_bytes_at_most,
    tokens_per_exchange,
)
from moefold.dispatch.symmetric import ArenaDispatcher, BoundedRoom, SymmetricDispatcher
from moefold.dispatch.tiled_experts import TiledExperts, signals_of_arena
from moefold.dispatch.traffic import (
    ExchangeSizes,
    NodeSizes,
    Traffic,
    TrafficCounter,
    choices_for_everyone,
    per_choice_sizes,
    per_rank_sizes,
    tokens_for_everyone,
)
from moefold.kernels.bound import BoundKernels
from moefold.kernels.choice import triton_runs
from moefold.kernels.experts.tiles_in_exchange import multiply_arrivals
from moefold.kernels.facts import BYTES_PER_ELEMENT
from moefold.kernels.routing.arrival_pieces import PieceSignals
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES


def expert_capacity(moe: MoeConfig, tokens: int) -> int:
    """Capacity of one expert for this number of tokens."""
    choices = moe.capacity.factor * tokens * moe.top_k
    rows = choices / moe.experts
    return math.ceil(rows)


def most_rows_per_expert(moe: MoeConfig, ranks: int, tokens: int) -> int:
    """Upper bound of an expert's rows, if each of `ranks` ranks sends up to its capacity, with padding."""
    most = expert_capacity(moe, tokens) * ranks
    multiple = moe.capacity.pad_rows
    return -(-most // multiple) * multiple


@dataclass(frozen=True)
class DispatchSetting:
    """Arguments of a builder: the run's ranks and kernels, the placement of experts, and the rows to be sent. `tokens`
    that a rank sends at a time in training, `choices` of a token at most. `patience`: seconds to wait for a rank.
    `most_rows` of a rank's experts that there is memory for; 0: for all that can come. `kept_rooms`: rooms in which
    arrived tokens stay (dispatch/kept_rooms.py). `tile_senders`: programs that send, of kernels of experts that
    multiply while tokens travel (dispatch/tiled_experts.py); 0: experts multiply what has arrived."""

    world: World
    kernels: BoundKernels
    row_policy: RowPolicy
    row_width: int
    dtype: torch.dtype
    tokens: int = 0
    choices: int = 1
    patience: float = 1800.0
    most_rows: int = 0
    kept_rooms: int = 0
    tile_senders: int = 0

    @property
    def experts(self) -> ExpertPlacement:
        return self.row_policy.experts


DispatcherBuilder = Callable[[DispatchSetting], Dispatcher]


class HopChain(NamedTuple):
    """The hops over ep, and the sizes of the hop over etp that follows where experts are sharded."""

    hops: list[Hop]
    for_everyone: Callable[[Traffic], ExchangeSizes] = tokens_for_everyone


HopsBuilder = Callable[[DispatchSetting], HopChain]


def build_local(setting: DispatchSetting) -> Dispatcher:
    return LocalDispatcher(setting.row_policy, setting.kernels)


def build_all_gather(setting: DispatchSetting) -> Dispatcher:
    return AllGatherDispatcher(setting.row_policy, setting.kernels, setting.world)


def build_from_hops(build_hops: HopsBuilder, setting: DispatchSetting) -> HopDispatcher:
    """A dispatcher of these hops over ep; where experts are sharded over etp, one more hop over etp."""
    world = setting.world
    hops, for_everyone = build_hops(setting)
    if world.etp.size > 1:
        rank_of = setting.experts.rank_of
        over_etp = AllToAllHop(world.etp, pack_for_everyone, rank_of, for_everyone, setting.kernels)
        hops = [*hops, over_etp]
    traffic = None
    if any(isinstance(hop, AllToAllHop) for hop in hops):
        traffic = TrafficCounter(setting.experts, world)
    return HopDispatcher(hops, setting.row_policy, setting.kernels, traffic)


def all_to_all_hops(setting: DispatchSetting) -> HopChain:
    ep = setting.world.ep
    rank_of = setting.experts.rank_of
    hop = AllToAllHop(ep, pack_per_choice, rank_of, per_choice_sizes, setting.kernels)
    return HopChain([hop], choices_for_everyone)


def dedup_hops(setting: DispatchSetting) -> HopChain:
    ep = setting.world.ep
    rank_of = setting.experts.rank_of
    hop = AllToAllHop(ep, pack_per_rank, rank_of, per_rank_sizes, setting.kernels)
    return HopChain([hop])


def hierarchical_hops(setting: DispatchSetting) -> HopChain:
    experts = setting.experts
    nodes = setting.world.ep_nodes
    inside = setting.world.ep_inside

    def node_of_expert(ids: Tensor) -> Tensor:
        ranks = experts.rank_of(ids)
        return ranks // inside.size

    def rank_within_node(ids: Tensor) -> Tensor:
        ranks = experts.rank_of(ids)
        return ranks % inside.size

    sizes = NodeSizes(inside.size)
    kernels = setting.kernels
    between_nodes = AllToAllHop(nodes, pack_per_rank, node_of_expert, sizes.between_nodes, kernels)
    within_node = AllToAllHop(inside, pack_per_rank, rank_within_node, sizes.within_node, kernels)
    return HopChain([between_nodes, within_node])


def deepep_hops(setting: DispatchSetting) -> HopChain:
    ep = setting.world.ep
    device = setting.world.device.type
    package = require_deepep(device, setting.dtype, setting.row_width)
    row_bytes = setting.row_width * setting.dtype.itemsize
    buffer = make_deepep_buffer(package, ep, row_bytes)
    hop = DeepEpHop(buffer, ep, setting.experts)
    return HopChain([hop])


def build_symmetric(setting: DispatchSetting) -> Dispatcher:
    world = setting.world
    ranks = world.ep_etp
    nodes = {rank // world.node_size for rank in ranks.ranks}
    if len(nodes) > 1:
        raise UserError(
            f"parallel.dispatcher = symmetric needs the ranks of ep x etp on one machine, but these {ranks.size} are "
            f"on {len(nodes)}; set it to dedup or hierarchical, or lower parallel.ep"
        )
    rows = arena_rows(setting.tokens, ranks.size, setting.most_rows)
    room = BoundedRoom(world.device) if setting.most_rows else None
    row_bytes = row_bytes_at_most(setting.row_width, setting.dtype.itemsize, setting.choices)
    experts = setting.experts
    announced = AnnouncedSizes(ranks.size, rows.tokens, setting.choices, experts.experts, experts.rank_count)
    size = room_bytes(rows, announced, row_bytes)
    pieces = blocks_of_tokens(rows.tokens) if setting.tile_senders else 0
    arena = make_arena(setting, size, pieces)
    direct = make_direct_sender(setting, arena, rows, room)
    collectives = build_from_hops(dedup_hops, setting)
    return SymmetricDispatcher(direct, collectives, arena, room)


def make_direct_sender(
    setting: DispatchSetting, arena: Arena, rows: ArenaRows, room: BoundedRoom | None
) -> ArenaDispatcher:
    inputs = (arena, setting.row_policy, setting.kernels, setting.world.etp.size, rows, room)
    if not setting.tile_senders:
        return ArenaDispatcher(*inputs)
    return TiledExperts(*inputs, signals=tile_signals(setting, arena))


def tile_signals(setting: DispatchSetting, arena: Arena) -> PieceSignals | None:
    """Signals of a kernel with a program on each processor; None: references run, on a CPU."""
    if not isinstance(arena, DeviceArena):
        return None
    senders = setting.tile_senders
    if setting.kernels.implementation_name(multiply_arrivals) == "reference":
        raise UserError(
            "parallel.tiles = experts has kernels in Triton for bf16 on Hopper, which do not run here (no such GPU, no "
            'Triton, or kernels.force has the reference); set parallel.tiles to ""'
        )
    processors = torch.cuda.get_device_properties(setting.world.device).multi_processor_count
    if senders >= processors:
        raise UserError(
            f"parallel.tile_senders = {senders}, but this GPU has {processors} processors, of which some have to "
            "multiply; set it to 16"
        )
    return signals_of_arena(arena, processors, senders)


def make_arena(setting: DispatchSetting, room_bytes: int, pieces: int = 0) -> Arena:
    """`pieces` of a rank's tokens that have flags of their own, on GPUs."""
    world = setting.world
    ranks = world.ep_etp
    if world.device.type == "cpu":
        return SharedArena(ranks, room_bytes, setting.patience, setting.kept_rooms)
    if not triton_runs(setting.kernels.facts):
        raise UserError(
            "parallel.dispatcher = symmetric signals by kernels in Triton on GPUs, but Triton is not installed or does "
            "not run on this one; install triton, or set parallel.dispatcher to dedup"
        )
    memory = open_device_memory(ranks, room_bytes, world.device, setting.kept_rooms, pieces)
    return DeviceArena(ranks, memory, setting.patience)


DISPATCHER_BUILDERS: dict[str, DispatcherBuilder] = {
    "local": build_local,
    "all_gather": build_all_gather,
    "all_to_all": partial(build_from_hops, all_to_all_hops),
    "dedup": partial(build_from_hops, dedup_hops),
    "hierarchical": partial(build_from_hops, hierarchical_hops),
    "deepep": partial(build_from_hops, deepep_hops),
    "symmetric": build_symmetric,
}


def row_policy_of(moe: MoeConfig, world: World, experts: ExpertPlacement) -> RowPolicy:
    limits_rows = moe.capacity.factor > 0
    drops = limits_rows or moe.router.kind == "expert_choice"
    each = None
    if moe.capacity.pad:
        each = partial(most_rows_per_expert, moe, world.ep_etp.size)
    multiple = moe.capacity.pad_rows
    return RowPolicy(experts, world.ep.index, drops, multiple, each)


def find_builder(name: str) -> DispatcherBuilder:
    """The builder of a dispatcher, built in or of an extension."""
    extension = find_extension("dispatcher", name)
    if extension is not None:
        return extension.load()
    known_name = one_of("builder of a dispatcher", name, DISPATCHER_BUILDERS)
    return DISPATCHER_BUILDERS[known_name]


def choose_dispatcher(config: Config, world: World) -> tuple[str, str]:
    """The dispatcher of a run and the reason. For `auto`, ranks measure the links between them: every rank calls this,
    and all get the same answer."""
    links = None
    measures = config.parallel.dispatcher == "auto"
    if measures and world.ep.size > 1:
        links = measure_links(world)
    bytes_each = BYTES_PER_ELEMENT[config.train.precision]
    return cheapest_dispatcher(config, world.node_size, bytes_each, links)


def tile_senders(parallel: ParallelConfig) -> int:
    """Programs that send in kernels of experts; 0: experts multiply what has arrived."""
    senders = parallel.tile_senders
    return senders if "experts" in parallel.tiles else 0


def build_dispatcher(
    config: Config,
    kernels: BoundKernels,
    world: World,
    experts: ExpertPlacement | None = None,
) -> Dispatcher:
    """The dispatcher of a run: the one that is set, the one of least predicted time, or the local one. `experts`:
    placement of experts, contiguous by default."""
    moe = config.model.moe
    name, _ = choose_dispatcher(config, world)
    build = find_builder(name)
    experts = experts or contiguous_placement(moe.experts, world.ep.size)
    slots = config.parallel.clone_slots
    sent_to = placement_with_slots(experts, slots) if slots else experts
    setting = DispatchSetting(
        world,
        kernels,
        row_policy_of(moe, world, sent_to),
        dispatched_width(config.model),
        DTYPES[config.train.precision],
        tokens_per_exchange(config),
        most_choices(moe),
        config.train.slow_timeout,
        bounded_rows(config),
        kept_rooms(config),
        tile_senders(config.parallel),
    )
    dispatcher = build(setting)
    if slots:
        dispatcher = with_clones(dispatcher, name, setting.world, experts, config.parallel)
    return with_fp8_payloads(dispatcher, name, setting, config.precision)


def with_clones(
    dispatcher: Dispatcher,
    name: str,
    world: World,
    experts: ExpertPlacement,
    parallel: ParallelConfig,
) -> Dispatcher:
    """The dispatcher with clones of hot experts in spare slots."""
    if not isinstance(dispatcher, HopDispatcher) or dispatcher.traffic is None:
        raise UserError(
            f"parallel.clone_slots = {parallel.clone_slots} with the dispatcher {name}, which does not count its "
            "traffic; set parallel.dispatcher to all_to_all, dedup or hierarchical"
        )
    return CloningDispatcher(dispatcher, experts, world, parallel.clone_slots, parallel.clone_decision)


def with_fp8_payloads(
    dispatcher: Dispatcher,
    name: str,
    setting: DispatchSetting,
    precision: PrecisionConfig,
) -> Dispatcher:
    """The dispatcher, with tokens and gradients sent in FP8 as configured; the local one sends nothing."""
    tokens = token_rule(precision)
    gradients = gradient_rule(precision)
    if name == "local" or tokens is gradients is None:
        return dispatcher
    if not isinstance(dispatcher, SendsRows):
        raise UserError(
            f"parallel.dispatcher = {name} has no methods send and give_back, which payloads in FP8 need; set "
            "precision.dispatch and precision.combine_gradient to plain"
        )
    return Fp8Dispatcher(dispatcher, setting.kernels, setting.row_width, tokens, gradients)
