"""Legal positions of the page's sliders: legal values, problems of a layout, and the nearest legal layout.

    pp 1 -> 2 on 8 GPUs with ep 8:  etp x ep x pp = 16 does not divide 8  ->  ep 4

The slider that was moved keeps its value; the others follow in as few halvings and doublings as the rules allow.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log2
from operator import attrgetter, getitem
from typing import Any

from moefold.config.rule import ConfigOnRanks, ConfigRule
from moefold.config.rules import RULES
from moefold.config.run import Config
from moefold.plan.request import SHORT_KEYS, PlanRequest, read_request
from moefold.plan.search import MOST_PIPELINE, divisors, powers_of_two

SLIDER_KEYS = (
    "parallel.tp",
    "parallel.cp",
    "parallel.pp",
    "pipeline.vpp",
    "parallel.ep",
    "parallel.etp",
    "train.micro_batch",
    "train.global_batch",
)
DISTANCE_WEIGHTS = {"train.global_batch": 4.0}  # learning depends on the batch: rather move a degree
MOST_STAGES = 16
MOST_SEQUENCES = 64
MOST_BATCH = 65_536
MOST_TENSOR = 8
CONTEXT_TOKENS = 1024  # least tokens of a context-parallel rank
MAX_LAYOUTS_TRIED = 20_000  # in the search for the nearest layout: half a second
SHORT_NAMES = {key: name for name, key in SHORT_KEYS.items()}

JsonObject = dict[str, Any]
Layout = Mapping[str, int]  # values by key
SliderValues = Mapping[str, Sequence[int]]
SliderPlaces = tuple[int, ...]  # of each slider, the index of its value


def legal_layouts(raw: Mapping[str, Any], hold: str = "") -> JsonObject:
    """Answer for the sliders. `values`: legal values of each key; `problems` of the layout, each with its keys;
    `changes` to the nearest legal layout, in which `hold` keeps its value; None when there is none near."""
    r = read_request(raw)
    case = ConfigOnRanks(r.config, r.gpus)
    values = {key: offered_values(r, key) for key in SLIDER_KEYS}
    broken = [rule for rule in RULES if not rule.holds(case)]
    changes: Layout | None = {}
    if broken:
        held_key = SHORT_KEYS.get(hold, hold)
        changes = nearest_legal_layout(case, values, held_key)
    return {
        "values": with_slider_names(values),
        "problems": [describe_problem(rule, case) for rule in broken],
        "changes": changes,
    }


def describe_problem(rule: ConfigRule, case: ConfigOnRanks) -> JsonObject:
    keys = list(map(slider_name, rule.reads))
    text = f"{rule.says(case)}; {rule.fix(case)}"
    return {"keys": keys, "text": text}


def slider_name(key: str) -> str:
    return SHORT_NAMES.get(key, key)


def with_slider_names(by_key: Mapping[str, Any]) -> JsonObject:
    named: JsonObject = {}
    for key, value in by_key.items():
        named[slider_name(key)] = value
    return named


def offered_values(r: PlanRequest, key: str) -> list[int]:
    """Values of one key that the model and the cluster allow, and its present value."""
    rules_of_key = [rule for rule in RULES if sliders_of_rule(rule) == {key}]
    offered = {config_value(r.config, key)}
    for value in candidate_values(r, key):
        config = config_with_layout(r.config, {key: value})
        case = ConfigOnRanks(config, r.gpus)
        if all_rules_hold(rules_of_key, case):
            offered.add(value)
    return sorted(offered)


def sliders_of_rule(rule: ConfigRule) -> set[str]:
    return set(rule.reads) & set(SLIDER_KEYS)


def all_rules_hold(rules: Sequence[ConfigRule], case: ConfigOnRanks) -> bool:
    return all(rule.holds(case) for rule in rules)


def candidate_values(r: PlanRequest, key: str) -> Sequence[int]:
    model = r.config.model
    pieces = model.layers + model.mtp + 2
    if key in ("parallel.tp", "parallel.etp"):
        most = min(MOST_TENSOR, r.gpu.domain)
        return dividing(r.gpus, powers_of_two(most))
    if key == "parallel.cp":
        most_context = r.config.data.seq_len // CONTEXT_TOKENS
        degrees = powers_of_two(max(1, most_context))
        return dividing(r.gpus, degrees)
    if key == "parallel.pp":
        most = min(MOST_PIPELINE, pieces)
        return dividing(r.gpus, range(1, most + 1))
    if key == "pipeline.vpp":
        halves = max(1, pieces // 2)
        most = min(MOST_STAGES, halves)
        return range(1, most + 1)
    if key == "parallel.ep":
        experts = model.moe.experts
        return dividing(r.gpus, divisors(experts))
    if key == "train.micro_batch":
        return powers_of_two(MOST_SEQUENCES)
    return global_batches(r.gpus)


def dividing(world: int, values: Sequence[int]) -> list[int]:
    return [value for value in values if world % value == 0]


def global_batches(world: int) -> list[int]:
    """Global batches: powers of two, and batches that split over all ranks, or over a half, a quarter, ... of them."""
    odd_part = world // (world & -world)
    powers = powers_of_two(MOST_BATCH)
    multiples = [odd_part * power for power in powers]
    batches = sorted({*powers, *multiples})
    return [batch for batch in batches if batch <= MOST_BATCH]


def config_value(config: Config, key: str) -> int:
    return attrgetter(key)(config)


def config_with_layout(config: Config, layout: Layout) -> Config:
    """The configuration with another layout."""
    sections = defaultdict[str, dict[str, int]](dict)
    for key, value in layout.items():
        section, name = key.split(".")
        sections[section][name] = value
    changed: dict[str, Any] = {}
    for name, values in sections.items():
        section = getattr(config, name)
        changed[name] = changed_section(section, tuple(values.items()))
    return replace(config, **changed)


@lru_cache(maxsize=MAX_LAYOUTS_TRIED)  # a search meets the same sections in many layouts
def changed_section(section: Any, values: tuple[tuple[str, int], ...]) -> Any:
    return replace(section, **dict(values))


def nearest_legal_layout(case: ConfigOnRanks, values: SliderValues, hold: str) -> Layout | None:
    """Best-first search over layouts by distance, one step of one slider at a time, until one breaks no rule."""
    movable = [rule for rule in RULES if sliders_of_rule(rule)]
    fixed = [rule for rule in RULES if not sliders_of_rule(rule)]
    if not all_rules_hold(fixed, case):
        return None
    now: dict[str, int] = {}
    start: SliderPlaces = ()
    for key in SLIDER_KEYS:
        now[key] = config_value(case.config, key)
        place = values[key].index(now[key])
        start += (place,)
    distances = [slider_distances(key, now[key], values[key]) for key in SLIDER_KEYS]
    # Nearest layouts first; a layout's neighbours are one step of one slider away.
    seen = {start}
    queue = [(0.0, 1, start)]  # of equally near layouts, the one found first
    while queue and len(seen) <= MAX_LAYOUTS_TRIED:
        _, _, places = heapq.heappop(queue)
        layout = layout_at_places(places, values)
        config = config_with_layout(case.config, layout)
        moved_case = ConfigOnRanks(config, case.world)
        if all_rules_hold(movable, moved_case):
            return changed_values(now, layout)
        for neighbour in neighbour_places(places, values, hold):
            if neighbour in seen:
                continue
            seen.add(neighbour)
            distance = sum(map(getitem, distances, neighbour))
            entry = distance, len(seen), neighbour
            heapq.heappush(queue, entry)
    return None


def changed_values(now: Layout, layout: Layout) -> JsonObject:
    changed: JsonObject = {}
    for key in SLIDER_KEYS:
        if layout[key] != now[key]:
            changed[slider_name(key)] = layout[key]
    return changed


def layout_at_places(places: SliderPlaces, values: SliderValues) -> Layout:
    layout: dict[str, int] = {}
    for key, place in zip(SLIDER_KEYS, places, strict=True):
        layout[key] = values[key][place]
    return layout


def neighbour_places(places: SliderPlaces, values: SliderValues, hold: str) -> Iterator[SliderPlaces]:
    """Layouts one step away, with the held slider unchanged."""
    for i, key in enumerate(SLIDER_KEYS):
        if key == hold:
            continue
        count = len(values[key])
        before = places[:i]
        here, *after = places[i:]
        for place in (here - 1, here + 1):
            if 0 <= place < count:
                yield (*before, place, *after)


def slider_distances(key: str, now: int, values: Sequence[int]) -> list[float]:
    """Halvings and doublings from the present value of a key to each of its values, weighted by key."""
    weight = DISTANCE_WEIGHTS.get(key, 1.0)
    return [weight * abs(log2(value / now)) for value in values]
