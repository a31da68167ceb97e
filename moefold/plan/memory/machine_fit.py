"""Whether a run fits the machine that it is about to start on. Torch-free.

A run is refused only where it certainly does not fit: a plan's memory is taken without its margin for uneven experts
and less `PLAN_ERROR`, and is compared with all memory of the machine, used or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf

from moefold.checkpoint.keeper.files import COPIES, GENERATIONS
from moefold.config.run import Config
from moefold.kernels.facts import expected_facts
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import MachineMemory
from moefold.plan.memory.peak_memory import RankMemory, plan_memory
from moefold.plan.memory.resident import OWN_WEIGHTS, moment_sizes
from moefold.plan.memory.run_setting import GIB
from moefold.plan.options import PRECISION_RECIPES, PlanChoices

PLAN_ERROR = 0.05  # share by which a plan's memory may exceed that of the run
SMALLEST_PART = 0.05  # GiB that a message shows
SAVED_MOMENT_BYTES: dict[float, float] = {2: 2}  # of plain bf16; of all others 4
MAIN_WEIGHT_BYTES = 4  # in a checkpoint, beside a weight of fewer bytes
SHOWN_PARTS = ("weights", "gradients", "main", "moments", "activations", "working")
CHECKPOINT_COPY = "the copy of a checkpoint"
CHECKPOINT_WINDOW = "the window of a checkpoint"

Ranks = list[RankMemory]


@dataclass(frozen=True)
class MemoryShortage:
    """A memory, such as "GPU 0", with fewer bytes than the ranks on it need."""

    memory: str
    ranks: int
    needed: float
    there: int
    parts: str


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of host memory that the ranks of a machine need, and their parts in words."""

    bytes: float
    parts: str


@dataclass(frozen=True)
class RanksHere:
    """The ranks of a run that one machine holds: `count` of them from `first` on, of `world` in all."""

    first: int
    count: int
    world: int


def ranks_of_machine(place: Rendezvous) -> RanksHere:
    """The ranks of this process's machine, which a launcher numbers one after the other."""
    first = place.rank - place.local_rank
    return RanksHere(first, place.local_size, place.size)


@dataclass(frozen=True)
class MachineFit:
    """A run on machines that all have the memory of this one, which holds `ranks`."""

    config: Config
    ranks: RanksHere
    machine: MachineMemory

    @cached_property
    def choices(self) -> PlanChoices:
        return choices_of_run(self.config)

    @property
    def on_gpu(self) -> bool:
        return self.choices.device == "cuda"

    @cached_property
    def by_pipeline_rank(self) -> Ranks:
        return plan_memory(self.config, self.ranks.world, self.choices)

    def fits_everywhere(self) -> bool:
        """Whether every machine of the run is large enough."""
        machines = range(0, self.ranks.world, self.ranks.count)
        shortages = map(self.first_shortage, machines)
        return not any(shortages)

    def first_shortage(self, first_rank: int | None = None) -> MemoryShortage | None:
        """The first memory that is too small, if any: on this machine, or on the one whose first rank is given."""
        first = self.ranks.first if first_rank is None else first_rank
        local = self.local_ranks(first)
        return next(self.shortages(local), None)

    def local_ranks(self, first: int) -> Ranks:
        """The ranks of the machine whose first rank is given."""
        world = self.ranks.world
        end = min(world, first + self.ranks.count)
        local: Ranks = []
        for rank in range(first, end):
            pipeline_rank = rank * self.config.parallel.pp // world  # pipeline ranks are outermost
            local.append(self.by_pipeline_rank[pipeline_rank])
        return local

    def shortages(self, local: Ranks) -> Iterator[MemoryShortage]:
        """Shortages of GPUs, then of the host."""
        if self.on_gpu and not self.machine.gpus:
            return  # torch will say that there is no GPU
        if self.on_gpu:
            yield from self.gpu_shortages(local)
        needs = self.host_needs(local)
        yield from shortage_of("host memory", self.machine.host, local, needs.bytes, needs.parts)

    def gpu_shortages(self, local: Ranks) -> Iterator[MemoryShortage]:
        """Shortages of GPUs, which more ranks than GPUs share."""
        gpus = self.machine.gpus
        on_gpu: defaultdict[int, Ranks] = defaultdict(list)
        for local_rank, rank in enumerate(local):
            number = local_rank % len(gpus)
            on_gpu[number].append(rank)
        for number, ranks in on_gpu.items():
            outside = sum(rank.outside for rank in ranks)
            needed = certain_bytes(ranks) + outside
            parts = list_parts(ranks)
            memory = gpus[number]
            yield from shortage_of(f"GPU {number}", memory, ranks, needed, parts)

    def host_needs(self, local: Ranks) -> HostNeeds:
        """What the ranks of a machine need of its host memory."""
        return self.host_needs_beside_gpus(local) if self.on_gpu else self.host_needs_on_cpu(local)

    def host_needs_beside_gpus(self, local: Ranks) -> HostNeeds:
        """What is offloaded, and what checkpoints go through."""
        offloaded = sum(rank.host for rank in local)
        needed = offloaded + self.checkpoint_bytes(local)
        parts = self.checkpoint_part(local)
        if offloaded:
            parts = f"offloaded {offloaded / GIB:,.1f}, {parts}"
        return HostNeeds(needed, parts)

    def host_needs_on_cpu(self, local: Ranks) -> HostNeeds:
        """All ranks share the host. The copy of a checkpoint stays allocated; that of a run's only checkpoint is made
        when no microbatch is live."""
        on_host = sum(rank.host for rank in local)
        steps = certain_bytes(local) + on_host
        copies = self.checkpoint_bytes(local)
        resident = sum(rank.state - rank.gradients + rank.host for rank in local)
        checkpoint = self.config.checkpoint
        saves_before_end = 0 < checkpoint.every < self.config.train.steps or checkpoint.memory_every > 0
        needed = max(steps, resident + copies)
        if saves_before_end:
            needed = steps + copies
        parts = f"{list_parts(local)}, {self.checkpoint_part(local)}"
        return HostNeeds(needed, parts)

    def checkpoint_part(self, local: Ranks) -> str:
        """The part of checkpoints, as a message shows it."""
        held = self.checkpoint_bytes(local) / GIB
        name = CHECKPOINT_WINDOW if self.saves_in_pieces(local) else CHECKPOINT_COPY
        return f"{name} {held:,.1f}"

    def checkpoint_bytes(self, local: Ranks) -> float:
        """Bytes that a machine holds of checkpoints: the window of one that is written to the disk, and the copy of one
        in memory with what a keeper holds."""
        held = self.window_bytes(local)
        if self.config.checkpoint.memory_every:
            copies = 1 + self.kept_copies
            held += copies * self.saved_bytes(local)
        return held

    def window_bytes(self, local: Ranks) -> float:
        """Bytes through which the files of a machine's ranks go to the disk: as many as the files have, or fewer."""
        checkpoint = self.config.checkpoint
        if not checkpoint.every:
            return 0.0
        most = checkpoint.host_gib * GIB or inf
        return min(most, self.saved_bytes(local))

    def saves_in_pieces(self, local: Ranks) -> bool:
        return 0 < self.window_bytes(local) < self.saved_bytes(local)

    @property
    def kept_copies(self) -> int:
        """How many times the keeper of a machine holds the files of its ranks, at most: two generations, and with
        several machines those of another one too."""
        of_machines = COPIES if self.ranks.world > self.ranks.count else 1
        return GENERATIONS * of_machines

    def saved_bytes(self, local: Ranks) -> float:
        """Bytes of the ranks' files of a checkpoint, at least: moments, weights and fp32 main weights of their shares.
        Moments in blocks are saved as fp32."""
        optim = self.config.optim
        sizes = moment_sizes(optim)
        if optim.rule == "muon":  # has one, but for embedding and head
            sizes = sizes[:1]
        parameters = sum(rank.updated for rank in local)
        saved = sum(SAVED_MOMENT_BYTES.get(size, 4) for size in sizes)
        wide = self.choices.recipe.wide
        has_main = wide < MAIN_WEIGHT_BYTES and optim.main not in OWN_WEIGHTS
        main = MAIN_WEIGHT_BYTES if has_main else 0
        of_parameter = saved + wide + main
        return parameters * of_parameter


def choices_of_run(config: Config) -> PlanChoices:
    """The plan's choices that a run would have on this machine."""
    facts = expected_facts(config)
    major, minor = facts.capability
    capability = 10 * major + minor
    precision = "bf16" if facts.dtype == "fp16" else facts.dtype  # equally large
    if precision not in PRECISION_RECIPES:
        precision = "fp32"  # fp64 needs even more
    device = facts.device
    return PlanChoices(precision=precision, device=device, capability=capability)  # pyright: ignore[reportArgumentType]


def certain_bytes(ranks: Ranks) -> float:
    return sum(rank.total - rank.margin for rank in ranks)


def list_parts(ranks: Ranks) -> str:
    """Parts of the memory of all ranks together, in GiB."""
    sizes: list[str] = []
    for name in SHOWN_PARTS:
        total = sum(getattr(rank, name) for rank in ranks)
        size = total / GIB
        if size >= SMALLEST_PART:
            sizes.append(f"{name} {size:,.1f}")
    return ", ".join(sizes)


def shortage_of(memory: str, there: int | None, ranks: Ranks, needed: float, parts: str) -> Iterator[MemoryShortage]:
    if there is None:
        return
    most = there * (1 + PLAN_ERROR)
    if needed > most:
        yield MemoryShortage(memory, len(ranks), needed, there, parts)
