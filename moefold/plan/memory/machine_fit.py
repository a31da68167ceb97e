"""Whether a run fits the machine that it is about to start on. Torch-free.

A run is refused only where it certainly does not fit: a plan's memory is taken without its margin for uneven experts
and less `PLAN_ERROR`, and is compared with all memory of the machine, used or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from moefold.checkpoint.keeper.files import COPIES, GENERATIONS
from moefold.config.run import Config
from moefold.kernels.facts import expected_facts
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import MachineMemory
from moefold.plan.memory.peak_memory import RankMemory, plan_memory
from moefold.plan.memory.resident import moment_sizes
from moefold.plan.memory.run_setting import GIB
from moefold.plan.options import PRECISION_RECIPES, PlanChoices

PLAN_ERROR = 0.05  # share by which a plan's memory may exceed that of the run
SMALLEST_PART = 0.05  # GiB that a message shows
SAVED_MOMENT_BYTES: dict[float, float] = {2: 2}  # of plain bf16; of all others 4
MAIN_WEIGHT_BYTES = 4  # in a checkpoint, beside a weight of fewer bytes
SHOWN_PARTS = ("weights", "gradients", "main", "moments", "activations", "working")
CHECKPOINT_COPY = "the copy of a checkpoint"

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
        world = self.ranks.world
        first = self.ranks.first if first_rank is None else first_rank
        end = min(world, first + self.ranks.count)
        local: Ranks = []
        for rank in range(first, end):
            pipeline_rank = rank * self.config.parallel.pp // world  # pipeline ranks are outermost
            local.append(self.by_pipeline_rank[pipeline_rank])
        shortages = self.gpu_shortages(local) if self.on_gpu else self.cpu_shortages(local)
        return next(shortages, None)

    def gpu_shortages(self, local: Ranks) -> Iterator[MemoryShortage]:
        """Shortages of GPUs, which more ranks than GPUs share, then of the host, where checkpoints are assembled."""
        gpus = self.machine.gpus
        if not gpus:
            return  # torch will say that there is no GPU
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
        offloaded = sum(rank.host for rank in local)
        needed = offloaded + self.checkpoint_bytes(local)
        parts = CHECKPOINT_COPY
        if offloaded:
            parts = f"offloaded {offloaded / GIB:,.1f}, {CHECKPOINT_COPY}"
        yield from self.host_shortage(local, needed, parts)

    def cpu_shortages(self, local: Ranks) -> Iterator[MemoryShortage]:
        """A shortage of the host, whose memory all ranks share. The copy of a checkpoint stays allocated; that of a
        run's only checkpoint is made when no microbatch is live."""
        on_host = sum(rank.host for rank in local)
        steps = certain_bytes(local) + on_host
        copies = self.checkpoint_bytes(local)
        resident = sum(rank.state - rank.gradients + rank.host for rank in local)
        checkpoint = self.config.checkpoint
        saves_before_end = 0 < checkpoint.every < self.config.train.steps or checkpoint.memory_every > 0
        needed = max(steps, resident + copies)
        if saves_before_end:
            needed = steps + copies
        parts = f"{list_parts(local)}, {CHECKPOINT_COPY} {copies / GIB:,.1f}"
        yield from self.host_shortage(local, needed, parts)

    def host_shortage(self, local: Ranks, needed: float, parts: str) -> Iterator[MemoryShortage]:
        return shortage_of("host memory", self.machine.host, local, needed, parts)

    def checkpoint_bytes(self, local: Ranks) -> float:
        """Bytes that a machine holds of checkpoints: the copy of one that is written to the disk, and that of one in
        memory with what a keeper holds."""
        checkpoint = self.config.checkpoint
        copies = 1 if checkpoint.every else 0
        if checkpoint.memory_every:
            copies += 1 + self.kept_copies
        return copies * self.saved_bytes(local)

    @property
    def kept_copies(self) -> int:
        """How many times the keeper of a machine holds the files of its ranks, at most: two generations, and with
        several machines those of another one too."""
        of_machines = COPIES if self.ranks.world > self.ranks.count else 1
        return GENERATIONS * of_machines

    def saved_bytes(self, local: Ranks) -> float:
        """Bytes of the ranks' files of a checkpoint, at least: moments, weights and fp32 main weights of their shares.
        A parameter has two moments at most; those in blocks are saved as fp32."""
        optim = self.config.optim
        sizes = moment_sizes(optim)
        moments = sum(rank.moments for rank in local)
        parameters = moments / sum(sizes)
        saved = sum(SAVED_MOMENT_BYTES.get(size, 4) for size in sizes)
        wide = self.choices.recipe.wide
        has_main = wide < MAIN_WEIGHT_BYTES and optim.main != "none"
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
