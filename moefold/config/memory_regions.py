"""Memory regions: named parts of a layer whose saved tensors a memory policy may keep, rebuild or offload.

One list for the configuration, the planner, `moefold explain` and the model. A region lies inside steps or spans whole
steps:

    step       attend               route  plan  dispatch  shared  experts      combine  add      mlp
    inside     norm up core out     norm         dispatch          dispatch                       norm
               swap (in core)                                      activation
    spans                           [------------------------- moe ------------------------]
                                                           shared  experts                        mlp
               [---------------------------- layer ----------------------------------------]

`memory.recompute` and `memory.offload` name regions, each for all layers or for some: `norm`, `moe@0-7`, `layer@3`,
`experts@0-14/2` for every second one.
`memory.recompute` may also name a preset, which stands for several regions: `sar`, `sar@0-7`.
`memory.offload` may also name `expert_weights`, which are no saved tensors: frozen weights of routed experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from moefold.config.errors import UserError, did_you_mean, printable_text

NORMED_STEPS = ("attend", "mlp", "route", "look_ahead", "set_aside", "predict")
MOE_STEPS = ("route", "narrow", "plan", "dispatch", "shared", "experts", "combine", "widen", "add")
TOKENS = "token_shard"  # every step reads it
BLOCK_INPUTS = ("stream", TOKENS, "imposed", "aux")


class Repeated(NamedTuple):
    """A collective of a region, and the axes of which one must have several ranks for it to be sent."""

    what: str
    axes: tuple[str, ...]


GATHER = Repeated("all-gather over tp", ("tp",))
CONTEXT = Repeated("exchange over cp", ("cp",))
SWAP_BACK = Repeated("all-to-all of heads over cp", ("cp",))
DISPATCH = Repeated("dispatch to the experts' ranks", ("ep", "etp"))
EXCHANGES = Repeated("plan, dispatch and combine with the experts' ranks", ("ep", "etp"))


@dataclass(frozen=True)
class RegionSpec:
    """A region lies `inside` the named steps, or it `spans` a run of steps: those of the names that the layer has.
    `reads`: the entries of the carry that a run of steps reads. `repeats`: collectives that recompute issues again,
    each with the axes that it is sent over."""

    name: str
    meaning: str
    inside: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    repeats: tuple[Repeated, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        return self.inside or self.spans

    @property
    def place(self) -> str:
        """The position in words: `inside attend` or `route to widen`."""
        if self.inside:
            return f"inside {', '.join(self.inside)}"
        first = self.spans[0]
        last = self.spans[-1]
        return first if first == last else f"{first} to {last}"

    @property
    def spans_exchange(self) -> bool:
        """Whether tokens are sent to the experts of other ranks inside."""
        return "dispatch" in self.spans

    def covers(self, other: RegionSpec) -> bool:
        """Whether all of another region lies inside this one."""
        return other is not self and set(other.steps) <= set(self.spans)


REGION_LIST = (
    RegionSpec("norm", "RMSNorms, with the all-gather over tp behind them", inside=NORMED_STEPS, repeats=(GATHER,)),
    RegionSpec(
        "up",
        "latent attention: projections up from the latents, with their norms",
        inside=("attend",),
        repeats=(GATHER,),
    ),
    RegionSpec(
        "core",
        "attention itself, from queries, keys and values to its result",
        inside=("attend",),
        repeats=(CONTEXT,),
    ),
    RegionSpec(
        "swap",
        "attention's result, swapped from heads back to positions (all-to-all context)",
        inside=("attend",),
        repeats=(SWAP_BACK,),
    ),
    RegionSpec("out", "attention's projection back to the stream", inside=("attend",)),
    RegionSpec(
        "mlp",
        "the MLP of dense layers, with its norm",
        spans=("mlp",),
        reads=("stream", TOKENS),
        repeats=(GATHER,),
    ),
    RegionSpec("shared", "shared experts", spans=("shared",), reads=("h_TD", TOKENS), repeats=(GATHER,)),
    RegionSpec(
        "dispatch",
        "tokens sent to the ranks of their experts, and the experts' rows gathered from them",
        inside=("dispatch", "experts"),
        repeats=(DISPATCH,),
    ),
    RegionSpec("experts", "routed experts, all of them", spans=("experts",), reads=("rows", TOKENS)),
    RegionSpec("activation", "the activation inside routed experts", inside=("experts",)),
    RegionSpec(
        "moe",
        "all of an MoE layer, with its norm",
        spans=MOE_STEPS,
        reads=BLOCK_INPUTS,
        repeats=(GATHER, EXCHANGES),
    ),
    RegionSpec(
        "layer",
        "a whole layer: only its input is kept",
        spans=("attend", "mlp", *MOE_STEPS),
        reads=BLOCK_INPUTS,
        repeats=(GATHER, CONTEXT, EXCHANGES),
    ),
)
REGIONS = {region.name: region for region in REGION_LIST}
NOT_REBUILT = "out"  # nothing keeps its output, and its input is that of its weight gradient
REBUILT_REGIONS = tuple(name for name in REGIONS if name != NOT_REBUILT)
SENDING_REGIONS = ("swap", "dispatch")  # nothing is saved inside but indices
OFFLOADED_REGIONS = tuple(name for name in REGIONS if name not in SENDING_REGIONS)

EXPERT_WEIGHTS = "expert_weights"  # in memory.offload: frozen weights of routed experts, held on the host

# Selective activation rematerialisation of MegaScale-MoE: of a layer are kept its input, queries, keys and values, the
# result of attention, the input of the second norm, and the experts' pre-activation.
PRESETS = {"sar": ("norm", "swap", "dispatch", "activation")}

# ---- entries of memory.recompute and memory.offload

RegionLayers = dict[str, frozenset[int] | None]  # by region: its layers, None for all

ENTRY = re.compile(r"(?P<name>[^@]+)(@(?P<first>\d{1,6})(-(?P<last>\d{1,6})(/(?P<every>[1-9]\d{0,5}))?)?)?")
ENTRY_FORM = (
    "expected region, region@layer, region@first-last or region@first-last/every, such as moe@0-7 or moe@0-14/2"
)


def parse_recompute(entries: Iterable[str], layers: int) -> RegionLayers:
    """The regions of `memory.recompute` with their layers, of a model with so many layers. Entries that cannot be read
    are refused, all at once."""
    return parse_entries(without_presets(entries), layers, REBUILT_REGIONS, tuple(PRESETS))


def without_presets(entries: Iterable[str]) -> tuple[str, ...]:
    """The entries with the regions of a preset in its place: `norm@0-7`, ... for `sar@0-7`."""
    regions: dict[str, None] = {}  # distinct ones, in order
    for entry in entries:
        name, at, layers = entry.partition("@")
        names = PRESETS.get(name, (name,)) if ENTRY.fullmatch(entry) else (name,)
        regions |= dict.fromkeys(f"{region}{at}{layers}" for region in names)
    return tuple(regions)


def parse_offload(entries: Iterable[str], layers: int) -> dict[str, frozenset[int]]:
    """The regions of `memory.offload` with their layers. The last layer stays: backward begins there."""
    last = layers - 1
    offloaded: dict[str, frozenset[int]] = {}
    problems: list[str] = []
    regions = entries_of_regions(entries)
    for name, named in parse_entries(regions, layers, OFFLOADED_REGIONS, (EXPERT_WEIGHTS,)).items():
        all_layers = frozenset(range(layers))
        kept_on_host = (all_layers if named is None else named) - {last}
        if not kept_on_host:
            problems.append(f'region "{name}" is named for layer {last} alone, which is the last and stays')
        offloaded[name] = kept_on_host
    if problems:
        raise UserError(*problems)
    return offloaded


def names_expert_weights(entry: str) -> bool:
    return entry.partition("@")[0] == EXPERT_WEIGHTS


def entries_of_regions(offload: Iterable[str]) -> tuple[str, ...]:
    """The entries of `memory.offload` whose saved tensors lie on the host: all but those of expert weights."""
    return tuple(entry for entry in offload if not names_expert_weights(entry))


def entries_of_expert_weights(offload: Iterable[str]) -> tuple[str, ...]:
    return tuple(entry for entry in offload if names_expert_weights(entry))


def expert_weight_layers(offload: Iterable[str], layers: int) -> frozenset[int]:
    """The layers for which `memory.offload` names expert weights, of a model with so many; some may have no experts."""
    named: frozenset[int] | None = frozenset()
    entries = entries_of_expert_weights(offload)
    for entry in entries:
        match = ENTRY.fullmatch(entry)
        problem = entry_problem(entry, match, layers, (EXPERT_WEIGHTS,))
        if problem or match is None:
            raise UserError(problem)
        named = joined_layers(named, entry_layers(match))
    return frozenset(range(layers)) if named is None else named


def parse_entries(
    entries: Iterable[str], layers: int, names: Sequence[str], presets: Sequence[str] = ()
) -> RegionLayers:
    """`presets`: further names that a message may propose."""
    found: RegionLayers = {}
    problems: list[str] = []
    for entry in entries:
        match = ENTRY.fullmatch(entry)
        problem = entry_problem(entry, match, layers, (*names, *presets))
        if problem:
            problems.append(problem)
        elif match is not None:
            name = match["name"]
            found[name] = joined_layers(found.get(name, frozenset()), entry_layers(match))
    problems += nested_region_problems(found)
    if problems:
        raise UserError(*problems)
    return found


def regions_by_layer(entries: Iterable[str], layers: int) -> dict[str, str]:
    """By region: the layers that the entries name for it, in words."""
    words: dict[str, str] = {}
    for name, named in parse_recompute(entries, layers).items():
        words[name] = "all layers" if named is None else f"layers {ranges_in_words(named)}"
    return words


def ranges_in_words(numbers: Iterable[int]) -> str:
    """0-7, 12"""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def recompute_problems(entries: Sequence[str], layers: int) -> str:
    """What is wrong with the entries, as one text; empty if nothing is."""
    try:
        parse_recompute(entries, layers)
    except UserError as error:
        return f"memory.recompute = {printable_text(','.join(entries))}: {'; '.join(error.problems)}"
    return ""


def offload_problems(entries: Sequence[str], recompute: Sequence[str], layers: int) -> str:
    """What is wrong with the entries of `memory.offload`, as one text; empty if nothing is."""
    try:
        expert_weight_layers(entries, layers)
        offloaded = parse_offload(entries, layers)
        problems = not_kept_problems(offloaded, parse_recompute(recompute, layers))
    except UserError as error:
        problems = list(error.problems)
    if not problems:
        return ""
    return f"memory.offload = {printable_text(','.join(entries))}: {'; '.join(problems)}"


def not_kept_problems(offloaded: Mapping[str, frozenset[int]], recomputed: RegionLayers) -> list[str]:
    """One problem for each offloaded region of which nothing is kept, since it lies inside a recomputed one."""
    problems: list[str] = []
    for inner, layers in offloaded.items():
        for outer in recomputed:
            if REGIONS[outer].covers(REGIONS[inner]) and share_a_layer(layers, recomputed[outer]):
                text = f'region "{inner}" lies inside "{outer}", which is recomputed: it keeps nothing to offload'
                problems.append(f'{text}; name "{outer}", or other layers')
    return problems


def entry_problem(entry: str, match: re.Match[str] | None, layers: int, names: Sequence[str]) -> str:
    shown = f'entry "{printable_text(entry)}"'
    if match is None:
        return f"{shown} cannot be read; {ENTRY_FORM}"
    name = match["name"]
    if name == NOT_REBUILT and name not in names:
        return f"{shown}: nothing is saved by rebuilding region {name}; leave it out"
    if name in SENDING_REGIONS and name not in names:
        return f"{shown}: region {name} saves nothing inside; leave it out"
    if name not in names:
        guess = did_you_mean(name, names)
        return f"{shown} names no region{guess}; there are: {', '.join(names)}"
    named = entry_layers(match)
    if named is None:
        return ""
    if not named:
        return f"{shown} ends before it begins; {ENTRY_FORM}"
    last = int(match["last"] or match["first"])
    if last >= layers:
        return f"{shown} names layer {last}; the model has layers 0 to {layers - 1}"
    return ""


def entry_layers(match: re.Match[str]) -> frozenset[int] | None:
    if match["first"] is None:
        return None
    first = int(match["first"])
    last = int(match["last"] or first)
    every = int(match["every"] or 1)
    return frozenset(range(first, last + 1, every))


def joined_layers(one: frozenset[int] | None, two: frozenset[int] | None) -> frozenset[int] | None:
    """The layers of either; None for all."""
    if one is None or two is None:
        return None
    return one | two


def nested_region_problems(regions: RegionLayers) -> list[str]:
    """One problem for each region that lies inside another in the same layer."""
    problems: list[str] = []
    for inner, outer in permutations(regions, 2):
        if REGIONS[outer].covers(REGIONS[inner]) and share_a_layer(regions[inner], regions[outer]):
            problems.append(f'region "{inner}" lies inside "{outer}", which covers it: name one of the two')
    return problems


def outermost_regions(names: Iterable[str]) -> tuple[str, ...]:
    """The regions without those that lie inside another of them."""
    named = dict.fromkeys(names)
    outermost: list[str] = []
    for name in named:
        if not any(REGIONS[other].covers(REGIONS[name]) for other in named):
            outermost.append(name)
    return tuple(outermost)


def share_a_layer(one: frozenset[int] | None, two: frozenset[int] | None) -> bool:
    if one is None or two is None:
        return True
    return not one.isdisjoint(two)
