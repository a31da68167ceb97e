"""Rules of `train.objective dpo`: what it reads, and what a step that compares with a reference model does not do."""

from __future__ import annotations

from moefold.config.rule import ConfigOnRanks, RuleList

OBJECTIVE = "train.objective"

PREFERENCE_RULES = RuleList()


def compares_responses(c: ConfigOnRanks) -> bool:
    return c.train.objective == "dpo"


@PREFERENCE_RULES.rule(
    "dpo reads preferences",
    (OBJECTIVE, "data.format"),
    why="dpo learns from a chosen and a rejected response",
    fix="set train.objective to next_token",
)
def dpo_reads_preferences(c: ConfigOnRanks) -> bool:
    return not compares_responses(c) or c.data.format == "preferences"


@PREFERENCE_RULES.rule(
    "preferences are read by dpo",
    ("data.format", OBJECTIVE),
    why="the next token of a rejected response is not to be learnt",
    fix="set train.objective to dpo",
)
def preferences_are_read_by_dpo(c: ConfigOnRanks) -> bool:
    return c.data.format != "preferences" or compares_responses(c)


@PREFERENCE_RULES.rule(
    "preferences are whole",
    ("data.format", "data.packing"),
    why="windows cut documents, and a response is compared with that of its own prompt",
    fix="set data.packing to best_fit",
)
def preferences_are_whole(c: ConfigOnRanks) -> bool:
    return c.data.format != "preferences" or c.data.packing != "windows"


@PREFERENCE_RULES.rule(
    "a step with a reference is launched anew",
    (OBJECTIVE, "memory.graphs"),
    why="forward passes of a reference are not captured",
    fix="set memory.graphs to none",
)
def reference_is_not_captured(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.memory.graphs != "none")


@PREFERENCE_RULES.rule(
    "preferences look one token ahead",
    (OBJECTIVE, "model.mtp"),
    why="a response has the probability that the model's own head gives it",
    fix="set model.mtp to 0",
)
def preferences_look_one_ahead(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.model.mtp)


@PREFERENCE_RULES.rule(
    "losses by token are not scaled",
    (OBJECTIVE, "train.precision"),
    why="gradients of single tokens have no loss scale",
    fix="set train.precision to bf16",
)
def losses_by_token_are_not_scaled(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.train.precision == "fp16")


@PREFERENCE_RULES.rule(
    "losses by token are not invariant",
    (OBJECTIVE, "kernels.invariant"),
    why="the op token_losses has no form whose rows do not depend on each other's number",
    fix="set kernels.invariant to false",
)
def losses_by_token_are_not_invariant(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.kernels.invariant)


@PREFERENCE_RULES.rule(
    "experts of a reference are not recorded",
    (OBJECTIVE, "train.record_routing"),
    why="a record of routing has the choices of one model",
    fix='leave it out (--train.record_routing "")',
)
def reference_is_not_recorded(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.train.record_routing)


@PREFERENCE_RULES.rule(
    "a reference chooses its own experts",
    (OBJECTIVE, "train.replay_routing"),
    why="a record of routing has the choices of one model",
    fix='leave it out (--train.replay_routing "")',
)
def reference_chooses_its_experts(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.train.replay_routing)


@PREFERENCE_RULES.rule(
    "a reference has no delayed scales",
    (OBJECTIVE, "precision.scaling"),
    why="delayed scales would be those of two models",
    fix="set precision.scaling to current",
)
def reference_has_no_delayed_scales(c: ConfigOnRanks) -> bool:
    return not (compares_responses(c) and c.precision.scaling == "delayed")
