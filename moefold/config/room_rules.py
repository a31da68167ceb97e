"""Rules of `parallel.room`: a bound of rows for the symmetric dispatcher, and steps that are run again without it."""

from __future__ import annotations

from moefold.config.rule import ConfigOnRanks, RuleList

ROOM = "parallel.room"
ALL_ROOM = "set parallel.room to 0"

ROOM_RULES = RuleList()


def has_bound(c: ConfigOnRanks) -> bool:
    return c.parallel.room > 0


@ROOM_RULES.rule(
    "a bound of rows has an arena",
    (ROOM, "parallel.dispatcher"),
    why="other dispatchers make room for what comes",
    fix="set parallel.dispatcher to symmetric, or parallel.room to 0",
)
def bound_has_an_arena(c: ConfigOnRanks) -> bool:
    return not has_bound(c) or c.parallel.dispatcher == "symmetric"


@ROOM_RULES.rule(
    "a bound of rows has ranks that send",
    (ROOM, "parallel.ep", "parallel.etp"),
    why="a rank that holds all experts sends nothing, and its rows have no bound",
    fix=ALL_ROOM,
)
def bound_has_ranks_that_send(c: ConfigOnRanks) -> bool:
    ranks = c.parallel.ep * c.parallel.etp
    return not has_bound(c) or ranks > 1


@ROOM_RULES.rule(
    "an even load has room",
    (ROOM,),
    why="with less than the mean of rows, every step finds no room",
    fix="set parallel.room to 1.5",
)
def even_load_has_room(c: ConfigOnRanks) -> bool:
    return not has_bound(c) or c.parallel.room >= 1


@ROOM_RULES.rule(
    "a bounded step updates at its end",
    (ROOM, "optim.when", "optim.clip_by", "train.precision", "precision.scaling"),
    why="a step whose rows found no room is run again from untouched state: updates inside backward, norms of the step "
    "before, a loss scale that moves with every step and delayed scales have used it by then",
    fix=ALL_ROOM,
)
def bounded_step_updates_at_its_end(c: ConfigOnRanks) -> bool:
    at_the_end = c.optim.when == "step" and c.optim.clip_by == "global"
    untouched = c.train.precision != "fp16" and c.precision.scaling == "current"
    return not has_bound(c) or (at_the_end and untouched)


@ROOM_RULES.rule(
    "a bounded step is recorded once",
    (ROOM, "train.record_routing", "observe.compare_every"),
    why="a step whose rows found no room is run again, and records of routing and checksums would have it twice",
    fix=ALL_ROOM,
)
def bounded_step_is_recorded_once(c: ConfigOnRanks) -> bool:
    is_counted = c.train.record_routing or c.config.observe.compare_every
    return not has_bound(c) or not is_counted
