"""The refusal of a run that cannot fit its machine: what is needed, what is there, and changes that would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from moefold.anatomy.regions import regions_of
from moefold.config.memory_regions import EXPERT_WEIGHTS, PRESETS, entries_of_expert_weights
from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.read import replace_values
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.config.run import Config, ModelConfig
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import this_machine
from moefold.plan.memory.machine_fit import MAIN_WEIGHT_BYTES, MachineFit, MemoryShortage, ranks_of_machine
from moefold.plan.memory.run_setting import GIB
from moefold.plan.memory.save_window import USABLE_SHARE, bounded_saves
from moefold.plan.options import RECOMPUTE_LADDER

MOST_MACHINES = 4096
SHORTEST_SEQUENCE = 128
SHORT_SEQUENCE = 512  # tried together with other changes, where no single change is enough

OFFLOAD_LADDER = (("experts",), ("core", "experts"), ("layer",))  # those that cost least first

Settings = Mapping[str, object]  # by path of the key


def misfit_problems(config: Config, place: Rendezvous) -> list[str]:
    """Problems of a run that cannot fit the machine of this process; none if it may fit."""
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return []  # the planner does not know the memory of another package's attention
    ranks = ranks_of_machine(place)
    fit = bounded_saves(MachineFit(config, ranks, this_machine()))
    shortage = fit.first_shortage()
    if shortage is None:
        return []
    return describe_shortage(fit, shortage)


def describe_shortage(fit: MachineFit, shortage: MemoryShortage) -> list[str]:
    """Lines of a refusal."""
    choices = fit.choices
    ranks = "1 rank" if shortage.ranks == 1 else f"{shortage.ranks} ranks"
    where = f"{ranks} on {choices.device} in {choices.precision}"
    needed_gib = shortage.needed / GIB
    needed = f"{needed_gib:,.1f} GiB of {shortage.memory} at least ({shortage.parts})"
    there = f"there are {shortage.there / GIB:,.1f} GiB"
    changes = "; ".join(propose_changes(fit))
    proposals = changes or "only a smaller model"
    return [
        f"{fit.config.name} does not fit this machine: {where}: {needed}; {there}",
        f"what would fit: {proposals}",
        "`moefold plan` finds layouts on GPUs; --force starts the run all the same",
    ]


def propose_changes(fit: MachineFit) -> list[str]:
    """Changes that make the run fit, each alone; where none does, together with a small microbatch."""
    usable = fit.machine.scaled(USABLE_SHARE)
    fit = replace(fit, machine=usable)
    proposals = [*memory_regions(fit)]
    proposals += smaller_microbatch(fit)
    proposals += shorter_sequences(fit)
    proposals += leaner_optimizer(fit)
    proposals += smaller_or_spread(fit)
    length = min(SHORT_SEQUENCE, fit.config.data.seq_len)
    small: Settings = {"train.micro_batch": 1, "data.seq_len": length}
    smaller = with_settings(fit, small)
    if proposals or smaller is None:
        return proposals
    words = command_words(small)
    return [f"{words} with {change}" for change in smaller_or_spread(smaller)]


def smaller_or_spread(fit: MachineFit) -> Iterator[str]:
    yield from fewer_layers(fit)
    yield from more_machines(fit)


def with_settings(fit: MachineFit, settings: Settings) -> MachineFit | None:
    """The run with other settings, if they are legal."""
    config = replace_values(fit.config, settings, "")
    case = ConfigOnRanks(config, fit.ranks.world)
    if broken_rules(case):
        return None
    return replace(fit, config=config)


def first_that_fits(fit: MachineFit, candidates: Iterable[Settings]) -> Iterator[str]:
    for settings in candidates:
        changed = with_settings(fit, settings)
        if changed is not None and changed.fits_everywhere():
            yield command_words(settings)
            return


def command_words(settings: Settings) -> str:
    words: list[str] = []
    for key, value in settings.items():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        words.append(f"--{key} {value}")
    return " ".join(words)


def memory_regions(fit: MachineFit) -> Iterator[str]:
    """The least recompute that makes the run fit, and on a GPU the least offload; first that of frozen experts."""
    model = fit.config.model
    offload = fit.config.memory.offload
    experts = entries_of_expert_weights(offload)
    if fit.on_gpu and not experts and fit.config.lora.rank and "experts" in regions_of(model, {}):
        yield from first_that_fits(fit, [{"memory.offload": (EXPERT_WEIGHTS, *offload)}])
    recomputed = settings_of_ladder("memory.recompute", RECOMPUTE_LADDER[1:], model)
    yield from first_that_fits(fit, recomputed)
    if fit.on_gpu:
        ladder = [(*experts, *names) for names in OFFLOAD_LADDER]
        offloaded = settings_of_ladder("memory.offload", ladder, model)
        yield from first_that_fits(fit, offloaded)


def settings_of_ladder(key: str, ladder: Sequence[Sequence[str]], model: ModelConfig) -> Iterator[Settings]:
    """The regions of each rung that the model has, and presets all of whose regions it has."""
    present = {*regions_of(model, {}), EXPERT_WEIGHTS}
    for names in ladder:
        regions: list[str] = []
        for entry in names:
            name = entry.partition("@")[0]
            if present.issuperset(PRESETS.get(name, (name,))):
                regions.append(entry)
        if regions:
            yield {key: tuple(regions)}


def smaller_microbatch(fit: MachineFit) -> Iterator[str]:
    sizes = range(fit.config.train.micro_batch - 1, 0, -1)
    candidates = [{"train.micro_batch": size} for size in sizes]
    yield from first_that_fits(fit, candidates)


def shorter_sequences(fit: MachineFit) -> Iterator[str]:
    candidates: list[Settings] = []
    length = fit.config.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        candidates.append({"data.seq_len": length})
        length //= 2
    yield from first_that_fits(fit, candidates)


def leaner_optimizer(fit: MachineFit) -> Iterator[str]:
    lean = {"optim.moments": "bf16"}
    leanest = {"optim.moments": "int8", "optim.main": "none"}
    if fit.choices.recipe.wide < MAIN_WEIGHT_BYTES:
        lean["optim.main"] = "split"
        yield from first_that_fits(fit, [lean, leanest])
    else:
        yield from first_that_fits(fit, [lean])


def fewer_layers(fit: MachineFit) -> Iterator[str]:
    """The most layers that fit, by bisection: memory grows with the number of layers."""
    fits = 0
    too_many = fit.config.model.layers
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        config = replace_values(fit.config, {"model.layers": middle}, "")
        smaller = replace(fit, config=config)
        if smaller.fits_everywhere():
            fits = middle
        else:
            too_many = middle
    counts = range(fits, 0, -1)  # the largest may break a rule, such as one of the pipeline
    candidates = [{"model.layers": layers} for layers in counts]
    yield from first_that_fits(fit, candidates)


def more_machines(fit: MachineFit) -> Iterator[str]:
    """The least power of two of such machines, or GPUs, over which experts and then layers can be spread."""
    one_gpu = fit.on_gpu and fit.ranks.count == 1
    unit = "GPUs" if one_gpu else "machines"
    machines = 2
    while machines <= MOST_MACHINES:
        spread = spread_over(fit, machines)
        if spread is not None and spread.fits_everywhere():
            parallel = spread.config.parallel
            degrees = {"parallel.ep": parallel.ep, "parallel.pp": parallel.pp}
            words = command_words(degrees)
            yield f"{machines} times as many {unit} of this size with {words}"
            return
        machines *= 2


def spread_over(fit: MachineFit, machines: int) -> MachineFit | None:
    """The run on so many times its machines, with as large a batch for each, if that is legal."""
    config = fit.config
    experts = config.model.moe.experts
    ep = config.parallel.ep
    left = machines
    while left > 1 and experts % (2 * ep) == 0:
        ep *= 2
        left //= 2
    settings: Settings = {
        "parallel.ep": ep,
        "parallel.pp": config.parallel.pp * left,
        "train.global_batch": config.train.global_batch * machines,
    }
    world = fit.ranks.world * machines
    ranks = replace(fit.ranks, world=world)
    larger = replace(fit, ranks=ranks)
    return with_settings(larger, settings)
