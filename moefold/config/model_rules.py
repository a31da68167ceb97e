"""Rules of the model: legal combinations of its mechanisms. A setting that would be ignored is refused."""

from __future__ import annotations

from moefold.config.rule import ConfigOnRanks, RuleList, set_to_divisor

ATTENTION = "model.attention."
MOE = "model.moe."
ROUTER = "model.moe.router."
BALANCE = "model.moe.balance."
CAPACITY = "model.moe.capacity."

MODEL_RULES = RuleList()


# Attention.


@MODEL_RULES.rule(
    "rotary dims fit the head",
    (ATTENTION + "rope_dim", ATTENTION + "head_dim"),
    why="dims are rotated in pairs, and no more of them than a head has",
    fix="set model.attention.rope_dim to an even number up to {model.attention.head_dim}, or 0 for all",
)
def rotary_dims_fit_the_head(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.rope_dim % 2 == 0 and a.rope_dim <= a.head_dim


def advise_rope_dim(c: ConfigOnRanks) -> str:
    head_dim = c.model.attention.head_dim
    if head_dim < 4:
        return "set model.attention.head_dim to 4 and model.attention.rope_dim to 2"
    return f"set model.attention.rope_dim to {head_dim // 4 * 2}"


@MODEL_RULES.rule(
    "mla has rotary and other dims",
    (ATTENTION + "kind", ATTENTION + "rope_dim", ATTENTION + "head_dim"),
    why="in MLA some dims of a head are rotary and the others come from the latent",
    fix=advise_rope_dim,
)
def mla_has_both_kinds_of_dims(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.kind != "mla" or 0 < a.rope_dim < a.head_dim


@MODEL_RULES.rule(
    "mla has a key head for each query head",
    (ATTENTION + "kind", ATTENTION + "heads", ATTENTION + "kv_heads"),
    why="MLA makes keys and values for every head",
    fix="set model.attention.kv_heads to {model.attention.heads}",
)
def mla_has_all_key_heads(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.kind != "mla" or a.kv_heads == a.heads


@MODEL_RULES.rule(
    "mla norms its latents only",
    (ATTENTION + "kind", ATTENTION + "qk_norm"),
    why="MLA has norms on its latents and none on queries and keys",
    fix="set model.attention.qk_norm to none",
)
def mla_norms_latents_only(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.kind != "mla" or a.qk_norm == "none"


@MODEL_RULES.rule(
    "latents are mla's",
    (ATTENTION + "kind", ATTENTION + "q_rank", ATTENTION + "value_dim"),
    why="only MLA has a latent for queries or values of another width",
    fix="set model.attention.kind to mla, or q_rank and value_dim to 0",
)
def latents_belong_to_mla(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.kind == "mla" or not (a.q_rank or a.value_dim)


@MODEL_RULES.rule(
    "full layers are for windows",
    (ATTENTION + "full_every", ATTENTION + "window"),
    why="without a window every layer has full attention",
    fix="set model.attention.full_every to 1, or model.attention.window above 0, such as 128",
)
def full_layers_need_a_window(c: ConfigOnRanks) -> bool:
    a = c.model.attention
    return a.full_every == 1 or a.window > 0


# Groups and devices of experts.


@MODEL_RULES.rule(
    "groups divide experts",
    (ROUTER + "groups", MOE + "experts"),
    why="experts do not split evenly into groups",
    fix=set_to_divisor(ROUTER + "groups", of=MOE + "experts"),
)
def groups_divide_experts(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    return moe.experts % moe.router.groups == 0


@MODEL_RULES.rule(
    "chosen groups exist",
    (ROUTER + "groups_chosen", ROUTER + "groups"),
    why="a token cannot choose from more groups than there are",
    fix="set model.moe.router.groups_chosen to at most {model.moe.router.groups}",
)
def chosen_groups_exist(c: ConfigOnRanks) -> bool:
    router = c.model.moe.router
    return router.groups_chosen <= router.groups


def experts_in_chosen_groups(c: ConfigOnRanks) -> int:
    moe = c.model.moe
    per_group = moe.experts // moe.router.groups
    return per_group * moe.router.groups_chosen


def advise_top_k(c: ConfigOnRanks) -> str:
    return f"set model.moe.top_k to at most {max(1, experts_in_chosen_groups(c))}"


@MODEL_RULES.rule(
    "chosen groups hold enough experts",
    (MOE + "top_k", ROUTER + "groups_chosen", ROUTER + "groups", MOE + "experts"),
    why="the groups that a token may choose from hold fewer experts than top_k",
    fix=advise_top_k,
)
def chosen_groups_hold_enough(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    router = moe.router
    if router.groups_chosen >= router.groups:
        return True
    if moe.experts % router.groups or moe.top_k > moe.experts:
        return True  # other rules refuse these
    return moe.top_k <= experts_in_chosen_groups(c)


@MODEL_RULES.rule(
    "devices divide experts",
    (BALANCE + "devices", MOE + "experts"),
    why="experts do not split evenly into groups",
    fix=set_to_divisor(BALANCE + "devices", of=MOE + "experts"),
)
def devices_divide_experts(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    return moe.experts % moe.balance.devices == 0


@MODEL_RULES.rule(
    "devices are for something",
    (BALANCE + "devices", BALANCE + "device_loss", CAPACITY + "per_device"),
    why="nothing uses groups of experts",
    fix="set model.moe.balance.device_loss above 0, such as 0.05, or model.moe.balance.devices to 1",
)
def devices_are_used(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    if moe.balance.devices == 1:
        return True
    return moe.balance.device_loss > 0 or moe.capacity.per_device


@MODEL_RULES.rule(
    "device capacity is a capacity",
    (CAPACITY + "per_device", CAPACITY + "factor", CAPACITY + "pad", ROUTER + "kind"),
    why="a group of experts needs a capacity factor, cannot be padded, and cannot be used with expert_choice",
    fix="set model.moe.capacity.per_device to false",
)
def device_capacity_is_a_capacity(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    capacity = moe.capacity
    if not capacity.per_device:
        return True
    drops = capacity.factor > 0 and not capacity.pad
    return drops and moe.router.kind != "expert_choice"


# Routers.


@MODEL_RULES.rule(
    "forced balance takes the place of the tokens' choice",
    (ROUTER + "force_balance", ROUTER + "kind"),
    why="round-robin routing replaces the choice of tokens, and no other",
    fix="set model.moe.router.force_balance to false, or model.moe.router.kind to token_choice",
)
def forced_balance_replaces_token_choice(c: ConfigOnRanks) -> bool:
    router = c.model.moe.router
    return not router.force_balance or router.kind == "token_choice"


@MODEL_RULES.rule(
    "looking ahead is accepted",
    (ROUTER + "kind", ROUTER + "looks_ahead"),
    why="this router uses later tokens of a sequence, which do not exist yet when a causal model generates",
    fix="set model.moe.router.looks_ahead to true to accept that, or model.moe.router.kind to token_choice",
)
def looking_ahead_is_accepted(c: ConfigOnRanks) -> bool:
    router = c.model.moe.router
    return router.kind == "token_choice" or router.looks_ahead


@MODEL_RULES.rule(
    "routers that balance by themselves have no bias",
    (ROUTER + "kind", BALANCE + "bias_rate", ROUTER + "groups"),
    why="only token_choice uses a selection bias or groups",
    fix="set model.moe.balance.bias_rate to 0 and model.moe.router.groups to 1, "
    "or model.moe.router.kind to token_choice",
)
def balanced_routers_have_no_bias(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    if moe.router.kind == "token_choice":
        return True
    return moe.balance.bias_rate == 0 and moe.router.groups == 1


@MODEL_RULES.rule(
    "experts that choose are balanced",
    (ROUTER + "kind", BALANCE + "aux_loss", BALANCE + "device_loss", CAPACITY + "pad"),
    why="experts that choose their tokens have even loads already",
    fix="set model.moe.balance.aux_loss, model.moe.balance.device_loss to 0 and model.moe.capacity.pad to false",
)
def experts_that_choose_are_balanced(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    if moe.router.kind != "expert_choice":
        return True
    balance = moe.balance
    return not (balance.aux_loss or balance.device_loss or moe.capacity.pad)


@MODEL_RULES.rule(
    "a softmax over the chosen is normalised over them",
    (ROUTER + "score", ROUTER + "normalize"),
    why="a softmax over the chosen experts sums to one over them",
    fix="set model.moe.router.normalize to chosen, or model.moe.router.score to softmax",
)
def chosen_softmax_is_normalised(c: ConfigOnRanks) -> bool:
    router = c.model.moe.router
    return router.score != "softmax_chosen" or router.normalize == "chosen"


# Shared experts and multi-token prediction.


@MODEL_RULES.rule(
    "a shared gate has shared experts",
    (MOE + "shared_gate", MOE + "shared_ffn"),
    why="there are no shared experts to gate",
    fix="set model.moe.shared_ffn above 0, or model.moe.shared_gate to false",
)
def shared_gate_has_shared_experts(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    return not moe.shared_gate or moe.shared_ffn > 0


def advise_mtp(c: ConfigOnRanks) -> str:
    return f"set model.mtp to at most {max(0, c.data.seq_len - 1)}"


@MODEL_RULES.rule(
    "further tokens lie within the sequence",
    ("model.mtp", "data.seq_len"),
    why="no position has that many tokens behind it",
    fix=advise_mtp,
)
def further_tokens_lie_within(c: ConfigOnRanks) -> bool:
    return c.model.mtp < c.data.seq_len
