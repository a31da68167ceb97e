"""Remedies where a plan does not fit: changes of one key, and numbers of GPUs, with which it would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from moefold.anatomy.frozen_base import base_size_of_all_ranks
from moefold.anatomy.model_totals import total_parameters
from moefold.config.errors import UserError
from moefold.config.read import with_values
from moefold.config.run import Config
from moefold.plan.allowed_changes import RuleNames, rules_broken_by
from moefold.plan.memory.grouped_parameters import trained_share
from moefold.plan.memory.peak_memory import GIB, fullest_rank, plan_memory
from moefold.plan.memory.resident import STATE_ELEMENT_BYTES
from moefold.plan.options import RECOMPUTE_LADDER, PlanChoices
from moefold.plan.request import PlanRequest
from moefold.plan.search import Candidate, LayoutSearch, SearchResult

GROWTH_FACTORS = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # of the number of GPUs
SHOWN_REASONS = 4
SHOWN_REMEDIES = 4
ROOMY_SHARE = 0.9  # of a GPU's memory; a bound below it leaves room for what bounds do not count
CHECKED_CANDIDATES = 4  # of those with less room
STATE_CHANGES = {  # of optimizer state, for the whole run
    "--optim.moments bf16": {"optim.moments": "bf16"},
    "--optim.main split": {"optim.main": "split"},
    "--optim.moments bf16 --optim.main split": {"optim.moments": "bf16", "optim.main": "split"},
    "--optim.moments int8 --optim.main none": {"optim.moments": "int8", "optim.main": "none"},
}


class NothingFits(UserError):
    """No layout fits the GPUs of a request."""

    exit_code = 3


@dataclass(frozen=True)
class Change:
    """A change of a plan in words, and the plan with it."""

    text: str
    config: Config
    choices: PlanChoices
    gpus: int

    def and_also(self, text: str) -> str:
        """This change in words, and a further one."""
        return f"{self.text} {text}".strip()

    @property
    def broken_rules(self) -> RuleNames:
        return rules_broken_by(self.config, self.choices, self.gpus)

    def with_config(self, text: str, config: Config) -> Change:
        """This change, and a further one of the configuration."""
        text = self.and_also(text)
        return replace(self, text=text, config=config)


def remedies_for_layout(r: PlanRequest, config: Config, choices: PlanChoices) -> list[str]:
    """Changes with which the layout fits, those of the trainer first, and a number of GPUs that is enough for it."""
    plan = Change("", config, choices, r.gpus)
    bases = [plan]
    broken = plan.broken_rules
    if config.train.micro_batch > 1:
        train = replace(config.train, micro_batch=1)
        smaller = replace(config, train=train)
        bases.append(plan.with_config("--train.micro_batch 1", smaller))
    remedies: list[str] = []
    for base in bases:
        changes = [base, *layout_changes(base)]
        fitting = [change.text for change in changes if fits_as_changed(r, change, broken)]
        room = SHOWN_REMEDIES - len(remedies)
        remedies += fitting[:room]
        enough = first_fitting(r, larger_clusters(base), broken)
        if enough:
            remedies.append(enough.text)
            break
    return remedies


def first_fitting(r: PlanRequest, changes: Iterator[Change], broken: RuleNames) -> Change | None:
    for change in changes:
        if fits_as_changed(r, change, broken):
            return change
    return None


def fits_as_changed(r: PlanRequest, change: Change, broken: RuleNames) -> bool:
    """Whether the changed plan fits and breaks no other rules than these."""
    if change.broken_rules - broken:
        return False
    ranks = plan_memory(change.config, change.gpus, change.choices)
    fullest = fullest_rank(ranks)
    gib = fullest.needed / GIB
    return gib <= r.gpu.memory


def layout_changes(plan: Change) -> Iterator[Change]:
    config = plan.config
    for name in ("ep", "pp", "tp", "cp"):
        degree = 2 * getattr(config.parallel, name)
        parallel = replace(config.parallel, **{name: degree})
        wider = replace(config, parallel=parallel)
        yield plan.with_config(f"--parallel.{name} {degree}", wider)
    for text, values in STATE_CHANGES.items():
        leaner = with_values(config, values, {})
        yield plan.with_config(text, leaner)
    for regions in RECOMPUTE_LADDER[1:]:
        names = ",".join(regions)
        text = plan.and_also(f"--recompute {names}")
        choices = replace(plan.choices, recompute=regions)
        yield replace(plan, text=text, choices=choices)


def larger_clusters(plan: Change) -> Iterator[Change]:
    """The same layout on more GPUs, with the same batch for each."""
    for factor in GROWTH_FACTORS:
        gpus = plan.gpus * factor
        config = grow_batch(plan.config, factor)
        grown = plan.with_config(f"--gpus {gpus}", config)
        yield replace(grown, gpus=gpus)


def grow_batch(config: Config, factor: int) -> Config:
    batch = config.train.global_batch * factor
    train = replace(config.train, global_batch=batch)
    return replace(config, train=train)


def explain_nothing_fits(r: PlanRequest, result: SearchResult) -> str:
    """The reasons why no layout is left, of which that of memory names the layout nearest to fitting, and what would
    fit."""
    reasons: list[str] = []
    refusals = result.refusals
    by_count = refusals.by_count()
    for reason, count in by_count[:SHOWN_REASONS]:
        example = refusals.examples[reason]
        reasons.append(f"{count} x {reason} ({example})")
    problem = f"no layout of {r.config.name} fits {r.gpus} x {r.gpu.name}"
    listed = "; ".join(reasons)
    tried = f"of {result.layouts_tried} tried: {listed}"
    remedies = ", or ".join(search_remedies(r))
    if not remedies:
        return f"{problem}, {tried}; fix fewer keys of the layout, or use more GPUs"
    return f"{problem}, {tried}; what fits: {remedies}"


def search_remedies(r: PlanRequest) -> list[str]:
    """Changes with which some layout fits: of optimizer state, more GPUs, recompute."""
    remedies: list[str] = []
    for text, values in STATE_CHANGES.items():
        if not r.fixed.isdisjoint(values):
            continue
        changed = with_values(r.config, values, {})
        if some_layout_fits(r, changed, r.gpus, r.fixed):
            remedies.append(text)
            break
    for factor in GROWTH_FACTORS:
        more = r.gpus * factor
        grown = grow_batch(r.config, factor)
        if some_layout_fits(r, grown, more, r.fixed):
            remedies.append(f"use {more} GPUs")
            break
    free = r.fixed - {"recompute"}
    if free != r.fixed and some_layout_fits(r, r.config, r.gpus, free):
        remedies.append("recompute, chosen by the search: leave --recompute and --memory.recompute out")
    return remedies


def least_weights_gib(config: Config, choices: PlanChoices, gpus: int) -> float:
    """GiB of weights and gradients of a GPU if they were cut over all GPUs: no layout needs less. Adapters are not
    counted; the base beside them may be held in blocks."""
    wide = choices.recipe.wide
    parameter = wide
    if config.optim.when == "step" and not config.lora.rank:
        trained = trained_share(config.model, config.optim.groups)
        parameter += trained * STATE_ELEMENT_BYTES[config.optim.gradients]
    whole = total_parameters(config.model) * parameter
    blocks = base_size_of_all_ranks(config, wide)
    whole -= blocks.weights * wide - blocks.bytes
    return whole / gpus / GIB


def some_layout_fits(r: PlanRequest, config: Config, gpus: int, fixed: frozenset[str]) -> bool:
    """Whether a layout fits in simulation: the first that has room by its bound, or one of those that need least."""
    if least_weights_gib(config, r.choices, gpus) > r.gpu.memory:
        return False
    search = LayoutSearch(gpus, r.gpu, r.choices, fixed)
    roomy = ROOMY_SHARE * r.gpu.memory
    tight: list[Candidate] = []
    for candidate in search.feasible_candidates(config):
        if candidate.gib > roomy:
            tight.append(candidate)
        elif search.rank_candidate(candidate):
            return True
    tight.sort(key=attrgetter("gib"))
    smallest = tight[:CHECKED_CANDIDATES]
    return any(map(search.rank_candidate, smallest))
