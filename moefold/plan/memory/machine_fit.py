"""Whether a run fits the machine it is about to start on, and what would fit if it does not. Torch-free.

A run is refused only where it certainly does not fit: a plan's memory is taken without its margin for uneven experts
and less `PLAN_ERROR`, and is compared with all memory of the machine, used or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moefold.config.errors import UserError
from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.read import replace_values
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.config.run import Config
from moefold.kernels.facts import expected_facts
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import MachineMemory, this_machine
from moefold.plan.memory.peak_memory import RankMemory, plan_memory
from moefold.plan.memory.resident import STATE_ELEMENT_BYTES
from moefold.plan.memory.run_setting import GIB
from moefold.plan.options import PRECISION_RECIPES, PlanChoices

PLAN_ERROR = 0.05  # share by which a plan's memory may exceed that of the run
USABLE_SHARE = 0.8  # of a memory, for what is proposed: a plan leaves out the process itself and unused allocations
MOST_MACHINES = 4096
SMALLEST_PART = 0.05  # GiB that a message shows
SHORTEST_SEQUENCE = 128
MAIN_WEIGHT_BYTES = 4  # in a checkpoint, beside a weight of fewer bytes
SHORT_SEQUENCE = 512  # tried together with other changes, where no single change is enough

Settings = Mapping[str, object]  # by path of the key


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


@dataclass(frozen=True)
class MachineFit:
    """A run's ranks on a machine with a memory, of which every machine of the run has as much."""

    config: Config
    ranks: RanksHere
    machine: MachineMemory

    @cached_property
    def choices(self) -> PlanChoices:
        facts = expected_facts(self.config)
        major, minor = facts.capability
        precision = facts.dtype if facts.dtype in PRECISION_RECIPES else "fp32"  # fp64 needs even more
        device = "cuda" if facts.device == "cuda" else "cpu"
        capability = 10 * major + minor
        return PlanChoices(precision=precision, device=device, capability=capability)  # pyright: ignore[reportArgumentType]

    @cached_property
    def by_pipeline_rank(self) -> list[RankMemory]:
        return plan_memory(self.config, self.ranks.world, self.choices)

    def first_shortage(self, first_rank: int | None = None) -> MemoryShortage | None:
        """The first memory that is too small, if any: on this machine, or on the one whose first rank is given."""
        world = self.ranks.world
        first = self.ranks.first if first_rank is None else first_rank
        local: list[RankMemory] = []
        for rank in range(first, min(world, first + self.ranks.count)):
            pipeline_rank = rank * self.config.parallel.pp // world  # pipeline ranks are outermost
            local.append(self.by_pipeline_rank[pipeline_rank])
        shortages = self.gpu_shortages(local) if self.choices.device == "cuda" else self.host_shortages(local)
        return next(shortages, None)

    def gpu_shortages(self, local: list[RankMemory]) -> Iterator[MemoryShortage]:
        """More ranks than GPUs share them. Checkpoints are assembled in host memory."""
        gpus = self.machine.gpus
        if not gpus:
            return  # torch will say that there is no GPU
        on_gpu: defaultdict[int, list[RankMemory]] = defaultdict(list)
        for local_rank, rank in enumerate(local):
            on_gpu[local_rank % len(gpus)].append(rank)
        for number, ranks in on_gpu.items():
            needed = sum(certain_bytes(rank) + rank.outside for rank in ranks)
            parts = list_parts(ranks)
            yield from shortage_of(f"GPU {number}", gpus[number], len(ranks), needed, parts)
        copies = sum(map(self.checkpoint_bytes, local))
        yield from shortage_of("host memory", self.machine.host, len(local), copies, "the copy of a checkpoint")

    def host_shortages(self, local: list[RankMemory]) -> Iterator[MemoryShortage]:
        """Ranks on a CPU share the host's memory. A checkpoint's copy stays allocated once one was written; the last
        one is written when no microbatch is live."""
        steps = sum(map(certain_bytes, local))
        copies = sum(map(self.checkpoint_bytes, local))
        resident = sum(rank.weights + rank.main + rank.moments for rank in local)
        saves_before_end = self.config.train.steps > self.config.checkpoint.every
        needed = steps + copies if saves_before_end else max(steps, resident + copies)
        parts = f"{list_parts(local)}, the copy of a checkpoint {copies / GIB:,.1f}"
        yield from shortage_of("host memory", self.machine.host, len(local), needed, parts)

    def checkpoint_bytes(self, rank: RankMemory) -> float:
        """Bytes of a rank's file of a checkpoint: moments, weights and fp32 main weights of its share."""
        moment_bytes = 2 * STATE_ELEMENT_BYTES[self.config.optim.moments]
        share = rank.moments / moment_bytes
        wide = self.choices.recipe.wide
        main = MAIN_WEIGHT_BYTES if wide < MAIN_WEIGHT_BYTES else 0
        return rank.moments + share * (wide + main)

    def fits(self) -> bool:
        """Whether every machine of the run is large enough."""
        machines = range(0, self.ranks.world, self.ranks.count)
        return all(self.first_shortage(first) is None for first in machines)

    # ---- what would fit

    def alternatives(self) -> list[str]:
        """Changes that make the run fit, each alone; where none does, together with a small microbatch."""
        found = [*self.smaller_microbatch(), *self.shorter_sequences(), *self.leaner_optimizer()]
        found += [*self.fewer_layers(), *self.more_machines()]
        length = min(SHORT_SEQUENCE, self.config.data.seq_len)
        small: Settings = {"train.micro_batch": 1, "data.seq_len": length}
        smaller = self.changed(small)
        if found or smaller is None:
            return found
        together = [*smaller.fewer_layers(), *smaller.more_machines()]
        return [f"{command_words(small)} with {change}" for change in together]

    def changed(self, values: Settings) -> MachineFit | None:
        """The run with other settings, if they are legal."""
        config = replace_values(self.config, values, "")
        if broken_rules(ConfigOnRanks(config, self.ranks.world)):
            return None
        return replace(self, config=config)

    def first_that_fits(self, candidates: Iterable[Settings]) -> Iterator[str]:
        for values in candidates:
            changed = self.changed(values)
            if changed is not None and changed.fits():
                yield command_words(values)
                return

    def smaller_microbatch(self) -> Iterator[str]:
        sizes = range(self.config.train.micro_batch - 1, 0, -1)
        yield from self.first_that_fits({"train.micro_batch": size} for size in sizes)

    def shorter_sequences(self) -> Iterator[str]:
        halvings: list[int] = []
        length = self.config.data.seq_len // 2
        while length >= SHORTEST_SEQUENCE:
            halvings.append(length)
            length //= 2
        yield from self.first_that_fits({"data.seq_len": length} for length in halvings)

    def leaner_optimizer(self) -> Iterator[str]:
        lean: dict[str, object] = {"optim.moments": "bf16"}
        if self.choices.recipe.wide < MAIN_WEIGHT_BYTES:
            lean["optim.main"] = "split"
        yield from self.first_that_fits([lean])

    def fewer_layers(self) -> Iterator[str]:
        """The most layers that fit, by bisection: memory grows with the number of layers."""
        fits, too_many = 0, self.config.model.layers
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            changed = replace(self, config=replace_values(self.config, {"model.layers": middle}, ""))
            if changed.fits():
                fits = middle
            else:
                too_many = middle
        counts = range(fits, 0, -1)  # the largest may break a rule, such as one of the pipeline
        yield from self.first_that_fits({"model.layers": layers} for layers in counts)

    def more_machines(self) -> Iterator[str]:
        """The least power of two of such machines over which the experts, then the layers, can be spread."""
        machines = 2
        while machines <= MOST_MACHINES:
            spread = self.spread_over(machines)
            if spread is not None and spread.fits():
                parallel = spread.config.parallel
                keys: Settings = {"parallel.ep": parallel.ep, "parallel.pp": parallel.pp}
                unit = "GPUs" if self.choices.device == "cuda" and self.ranks.count == 1 else "machines"
                yield f"{machines} times as many {unit} of this size with {command_words(keys)}"
                return
            machines *= 2

    def spread_over(self, machines: int) -> MachineFit | None:
        config = self.config
        ep = config.parallel.ep
        pp = config.parallel.pp
        left = machines
        while left > 1 and config.model.moe.experts % (2 * ep) == 0:
            ep *= 2
            left //= 2
        values: Settings = {
            "parallel.ep": ep,
            "parallel.pp": pp * left,
            "train.global_batch": config.train.global_batch * machines,
        }
        ranks = replace(self.ranks, world=self.ranks.world * machines)
        return replace(self, ranks=ranks).changed(values)


def certain_bytes(rank: RankMemory) -> float:
    return rank.total - rank.margin


def shortage_of(memory: str, there: int | None, ranks: int, needed: float, parts: str) -> Iterator[MemoryShortage]:
    if there is not None and needed > there * (1 + PLAN_ERROR):
        yield MemoryShortage(memory, ranks, needed, there, parts)


def command_words(values: Settings) -> str:
    return " ".join(f"--{key} {value}" for key, value in values.items())


def ranks_of_machine(place: Rendezvous) -> RanksHere:
    """The ranks of this process's machine, which a launcher numbers one after the other."""
    return RanksHere(place.rank - place.local_rank, place.local_size, place.size)


def require_fit(config: Config, place: Rendezvous) -> None:
    """Refuse a run that cannot fit the machine of this process."""
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return  # the planner does not know the memory of another package's attention
    fit = MachineFit(config, ranks_of_machine(place), this_machine())
    shortage = fit.first_shortage()
    if shortage is not None:
        raise UserError(*describe_shortage(fit, shortage))


def describe_shortage(fit: MachineFit, shortage: MemoryShortage) -> list[str]:
    """Lines of a refusal: what is needed, what is there, what would fit."""
    choices = fit.choices
    ranks = "1 rank" if shortage.ranks == 1 else f"{shortage.ranks} ranks"
    needed = f"{shortage.needed / GIB:,.1f} GiB of {shortage.memory} at least ({shortage.parts})"
    there = f"there are {shortage.there / GIB:,.1f} GiB"
    usable = replace(fit, machine=fit.machine.scaled(USABLE_SHARE))
    alternatives = "; ".join(usable.alternatives()) or "only a smaller model"
    return [
        f"{fit.config.name} does not fit this machine: {ranks} on {choices.device} in {choices.precision}: {needed}; "
        f"{there}",
        f"what would fit: {alternatives}",
        "`moefold plan` finds layouts on GPUs; --force starts the run all the same",
    ]


def list_parts(ranks: list[RankMemory]) -> str:
    """Parts of the memory of all ranks together, in GiB."""
    sizes: list[str] = []
    for name in ("weights", "gradients", "main", "moments", "activations", "working"):
        size = sum(getattr(rank, name) for rank in ranks) / GIB
        if size >= SMALLEST_PART:
            sizes.append(f"{name} {size:,.1f}")
    return ", ".join(sizes)
