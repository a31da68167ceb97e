"""Where sliders may stand: values a model and a cluster allow, what is wrong with a layout, and the nearest sound one.

    pp 1 -> 2 on 8 GPUs with ep 8:  etp x ep x pp = 16 does not divide 8  ->  ep 4

What a person has just moved stays; the rest follows by as few halvings and doublings as the rules allow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import log2
from operator import attrgetter
from typing import Any

from moefold.config.rules import RULES, ConfigOnRanks
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
DISTANCE_WEIGHTS = {"train.global_batch": 4.0}  # a batch is what learning depends on: rather move a degree
MOST_STAGES, MOST_SEQUENCES, MOST_BATCH = 16, 64, 65_536
MAX_LAYOUTS_TRIED = 20_000  # layouts that the nearest is looked for among: half a second
SHORT_NAMES = {key: name for name, key in SHORT_KEYS.items()}


def legal_layouts(raw: Mapping[str, Any], hold: str = "") -> dict[str, Any]:
    """`values` that each key may take; `problems` of the layout, with the keys that have part in each; `changes` that
    lead to the nearest layout without any, where `hold` stays as it is; None when there is none near."""
    r = read_request(raw)
    case = ConfigOnRanks(r.config, r.gpus)
    values = {key: offered_values(r, key) for key in SLIDER_KEYS}
    broken = [rule for rule in RULES if not rule.holds(case)]
    return {
        "values": {slider_name(key): each for key, each in values.items()},
        "problems": [
            {"keys": [slider_name(key) for key in rule.reads], "text": f"{rule.says(case)}; {rule.fix(case)}"}
            for rule in broken
        ],
        "changes": nearest_legal_layout(case, values, SHORT_KEYS.get(hold, hold)) if broken else {},
    }


def slider_name(key: str) -> str:
    return SHORT_NAMES.get(key, key)


def offered_values(r: PlanRequest, key: str) -> list[int]:
    """What the model and the cluster allow a key by itself, and where it stands now."""
    alone = [rule for rule in RULES if set(rule.reads) & set(SLIDER_KEYS) == {key}]
    now = config_value(r.config, key)
    sound = [
        v
        for v in candidate_values(r, key)
        if all(rule.holds(ConfigOnRanks(config_with_layout(r.config, {key: v}), r.gpus)) for rule in alone)
    ]
    return sorted({now, *sound})


def candidate_values(r: PlanRequest, key: str) -> list[int]:
    world, model = r.gpus, r.config.model
    inside = [n for n in powers_of_two(min(8, r.gpu.domain)) if world % n == 0]
    pieces = model.layers + model.mtp + 2
    return {
        "parallel.tp": inside,
        "parallel.cp": [n for n in powers_of_two(max(1, r.config.data.seq_len // 1024)) if world % n == 0],
        "parallel.pp": [n for n in range(1, min(MOST_PIPELINE, pieces) + 1) if world % n == 0],
        "pipeline.vpp": list(range(1, min(MOST_STAGES, max(1, pieces // 2)) + 1)),
        "parallel.ep": [n for n in divisors(model.moe.experts) if world % n == 0],
        "parallel.etp": inside,
        "train.micro_batch": powers_of_two(MOST_SEQUENCES),
        "train.global_batch": [
            n for n in sorted({*powers_of_two(MOST_BATCH), *batch_multiples(world)}) if n <= MOST_BATCH
        ],
    }[key]


def batch_multiples(world: int) -> Iterator[int]:
    """What splits over so many ranks, and over halves of them."""
    odd = world // (world & -world)
    yield from (odd * n for n in powers_of_two(MOST_BATCH))


def config_value(config: Config, key: str) -> int:
    return attrgetter(key)(config)


def config_with_layout(config: Config, layout: Mapping[str, int]) -> Config:
    """The configuration with another layout."""
    sections: dict[str, dict[str, int]] = {}
    for key, value in layout.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def nearest_legal_layout(case: ConfigOnRanks, values: Mapping[str, list[int]], hold: str) -> dict[str, int] | None:
    """Layouts in the order of their distance, a step on one slider at a time, until one breaks no rule."""
    movable = [rule for rule in RULES if set(rule.reads) & set(SLIDER_KEYS)]
    if not all(rule.holds(case) for rule in RULES if rule not in movable):
        return None
    now = {key: config_value(case.config, key) for key in SLIDER_KEYS}
    order = count()  # of equally near layouts the one found first
    ahead = [(0.0, next(order), tuple(values[key].index(now[key]) for key in SLIDER_KEYS))]
    seen = {ahead[0][2]}
    while ahead and len(seen) <= MAX_LAYOUTS_TRIED:
        _, _, places = heapq.heappop(ahead)
        layout = {key: values[key][place] for key, place in zip(SLIDER_KEYS, places, strict=True)}
        then = ConfigOnRanks(config_with_layout(case.config, layout), case.world)
        if all(rule.holds(then) for rule in movable):
            return {slider_name(key): value for key, value in layout.items() if value != now[key]}
        for step in neighbour_layouts(places, values, hold):
            if step not in seen:
                seen.add(step)
                far = (slider_distance(key, now[key], values[key][i]) for key, i in zip(SLIDER_KEYS, step, strict=True))
                heapq.heappush(ahead, (sum(far), next(order), step))
    return None


def neighbour_layouts(places: tuple[int, ...], values: Mapping[str, list[int]], hold: str) -> Iterator[tuple[int, ...]]:
    for i, key in enumerate(SLIDER_KEYS):
        for place in (places[i] - 1, places[i] + 1):
            if key != hold and 0 <= place < len(values[key]):
                yield (*places[:i], place, *places[i + 1 :])


def slider_distance(key: str, now: int, then: int) -> float:
    return abs(log2(then / now)) * DISTANCE_WEIGHTS.get(key, 1.0)
