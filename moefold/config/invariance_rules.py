"""Rules of `kernels.invariant`: nothing may let a token's bits depend on the rest of its batch."""

from __future__ import annotations

from moefold.config.precision_rules import ENTRIES, RECIPE, recipes_in_use
from moefold.config.rule import Condition, ConfigOnRanks, RuleList

INVARIANT = "kernels.invariant"
ROUTER = "model.moe.router."
INVARIANT_DISPATCHERS = ("auto", "all_to_all")

INVARIANCE_RULES = RuleList()


def invariance_rule(name: str, reads: tuple[str, ...], why: str, fix: str, holds: Condition) -> None:
    """A rule that holds wherever bits may depend on the batch."""

    def holds_if_invariant(c: ConfigOnRanks) -> bool:
        return not c.kernels.invariant or holds(c)

    INVARIANCE_RULES.rule(name, (INVARIANT, *reads), fix, why=why)(holds_if_invariant)


def keeps_all_choices(c: ConfigOnRanks) -> bool:
    return c.model.moe.capacity.factor == 0


def tokens_choose(c: ConfigOnRanks) -> bool:
    return c.model.moe.router.kind == "token_choice"


def routes_by_scores(c: ConfigOnRanks) -> bool:
    router = c.model.moe.router
    return router.jitter == 0 and not router.force_balance


def keeps_inputs(c: ConfigOnRanks) -> bool:
    return c.lora.dropout == 0


def has_plain_products(c: ConfigOnRanks) -> bool:
    return not any(spec.quantises for spec in recipes_in_use(c))


def sums_in_one_order(c: ConfigOnRanks) -> bool:
    sends = c.parallel.ep * c.parallel.etp > 1
    return not sends or c.parallel.dispatcher in INVARIANT_DISPATCHERS


def sees_whole_sequences(c: ConfigOnRanks) -> bool:
    return c.parallel.cp == 1


def launches_kernels(c: ConfigOnRanks) -> bool:
    return c.memory.graphs == "none"


def forces_nothing(c: ConfigOnRanks) -> bool:
    return not c.kernels.force


invariance_rule(
    "invariant runs drop nothing",
    ("model.moe.capacity.factor",),
    "whether a full expert drops a token depends on other tokens",
    "set model.moe.capacity.factor to 0",
    keeps_all_choices,
)
invariance_rule(
    "tokens of invariant runs choose their experts",
    (ROUTER + "kind",),
    "this router looks at all tokens of a batch",
    f"set {ROUTER}kind to token_choice",
    tokens_choose,
)
invariance_rule(
    "invariant runs route by scores alone",
    (ROUTER + "jitter", ROUTER + "force_balance"),
    "noise and forced balance depend on a token's place in the batch",
    f"set {ROUTER}jitter to 0 and {ROUTER}force_balance to false",
    routes_by_scores,
)
invariance_rule(
    "adapters of invariant runs drop nothing",
    ("lora.dropout",),
    "what is dropped depends on a token's place in the batch",
    "set lora.dropout to 0",
    keeps_inputs,
)
invariance_rule(
    "products of invariant runs are plain",
    (RECIPE, ENTRIES),
    "products of quantised operands are not written for it",
    "set precision.recipe to plain",
    has_plain_products,
)
invariance_rule(
    "invariant runs sum a token's results in one order",
    ("parallel.dispatcher", "parallel.ep", "parallel.etp"),
    "other dispatchers than all_to_all sum the results of a rank first",
    "set parallel.dispatcher to all_to_all",
    sums_in_one_order,
)
invariance_rule(
    "sequences of invariant runs are whole",
    ("parallel.cp",),
    "attention of sequences that are cut over ranks is not written for it",
    "set parallel.cp to 1",
    sees_whole_sequences,
)
invariance_rule(
    "invariant runs choose their kernels",
    ("kernels.force",),
    "a forced implementation may not be invariant",
    'set kernels.force to ""',
    forces_nothing,
)
invariance_rule(
    "invariant runs are launched by the host",
    ("memory.graphs",),
    "the host reads how many rows each expert has",
    "set memory.graphs to none",
    launches_kernels,
)
