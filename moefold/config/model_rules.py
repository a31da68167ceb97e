"""Rules about the model alone: which of its mechanisms go together. A setting that would be ignored is refused."""

from __future__ import annotations

from moefold.config.rule import ConfigRule, divisors_in_words, simple_rule
from moefold.config.run import Config

ATTENTION, MOE, ROPE = "model.attention.", "model.moe.", "model.attention.rope."


def experts_per_group(c: Config) -> int:
    return c.model.moe.experts // c.model.moe.router.groups


MODEL_RULES: list[ConfigRule] = [
    simple_rule(
        "turning dims fit the head",
        (ATTENTION + "rope_dim", ATTENTION + "head_dim"),
        lambda c: c.model.attention.rope_dim % 2 == 0 and c.model.attention.rope_dim <= c.model.attention.head_dim,
        "dims turn in pairs, and no more of them than a head has",
        lambda c: f"set model.attention.rope_dim to an even number up to {c.model.attention.head_dim}, or 0 for all",
    ),
    simple_rule(
        "mla has still and turning dims",
        (ATTENTION + "kind", ATTENTION + "rope_dim", ATTENTION + "head_dim"),
        lambda c: c.model.attention.kind != "mla" or 0 < c.model.attention.rope_dim < c.model.attention.head_dim,
        "in mla some dims of a head turn by position and the others come from the latent",
        lambda c: (
            f"set model.attention.rope_dim to {c.model.attention.head_dim // 4 * 2}"
            if c.model.attention.head_dim >= 4
            else "set model.attention.head_dim to 4 and model.attention.rope_dim to 2"
        ),
    ),
    simple_rule(
        "mla has a key head for each query head",
        (ATTENTION + "kind", ATTENTION + "heads", ATTENTION + "kv_heads"),
        lambda c: c.model.attention.kind != "mla" or c.model.attention.kv_heads == c.model.attention.heads,
        "mla makes keys and values for every head",
        lambda c: f"set model.attention.kv_heads to {c.model.attention.heads}",
    ),
    simple_rule(
        "mla norms its latents only",
        (ATTENTION + "kind", ATTENTION + "qk_norm"),
        lambda c: c.model.attention.kind != "mla" or c.model.attention.qk_norm == "none",
        "mla has norms on its latents and none on queries and keys",
        "set model.attention.qk_norm to none",
    ),
    simple_rule(
        "latents are mla's",
        (ATTENTION + "kind", ATTENTION + "q_rank", ATTENTION + "value_dim"),
        lambda c: c.model.attention.kind == "mla" or not (c.model.attention.q_rank or c.model.attention.value_dim),
        "only mla has a latent for queries or values of another width",
        "set model.attention.kind to mla, or q_rank and value_dim to 0",
    ),
    simple_rule(
        "full layers are for windows",
        (ATTENTION + "full_every", ATTENTION + "window"),
        lambda c: c.model.attention.full_every == 1 or c.model.attention.window > 0,
        "without a window every layer sees all",
        "set model.attention.full_every to 1, or model.attention.window above 0, such as 128",
    ),
    simple_rule(
        "groups divide experts",
        (MOE + "router.groups", MOE + "experts"),
        lambda c: c.model.moe.experts % c.model.moe.router.groups == 0,
        "experts do not split evenly into groups",
        lambda c: f"set model.moe.router.groups to one of {divisors_in_words(c.model.moe.experts)}",
    ),
    simple_rule(
        "chosen groups exist",
        (MOE + "router.groups_chosen", MOE + "router.groups"),
        lambda c: c.model.moe.router.groups_chosen <= c.model.moe.router.groups,
        "a token cannot choose from more groups than there are",
        lambda c: f"set model.moe.router.groups_chosen to at most {c.model.moe.router.groups}",
    ),
    simple_rule(
        "chosen groups hold enough experts",
        (MOE + "top_k", MOE + "router.groups_chosen", MOE + "router.groups", MOE + "experts"),
        lambda c: (
            c.model.moe.router.groups_chosen >= c.model.moe.router.groups
            or c.model.moe.experts % c.model.moe.router.groups > 0
            or c.model.moe.top_k > c.model.moe.experts
            or c.model.moe.top_k <= experts_per_group(c) * c.model.moe.router.groups_chosen
        ),
        "the groups a token may choose from hold fewer experts than it visits",
        lambda c: f"set model.moe.top_k to at most {max(1, experts_per_group(c) * c.model.moe.router.groups_chosen)}",
    ),
    simple_rule(
        "devices divide experts",
        (MOE + "balance.devices", MOE + "experts"),
        lambda c: c.model.moe.experts % c.model.moe.balance.devices == 0,
        "experts do not split evenly into groups",
        lambda c: f"set model.moe.balance.devices to one of {divisors_in_words(c.model.moe.experts)}",
    ),
    simple_rule(
        "devices are for something",
        (MOE + "balance.devices", MOE + "balance.device_loss", MOE + "capacity.per_device"),
        lambda c: (
            c.model.moe.balance.devices == 1 or c.model.moe.balance.device_loss > 0 or c.model.moe.capacity.per_device
        ),
        "nothing looks at groups of experts",
        "set model.moe.balance.device_loss above 0, such as 0.05, or model.moe.balance.devices to 1",
    ),
    simple_rule(
        "device capacity is a capacity",
        (MOE + "capacity.per_device", MOE + "capacity.factor", MOE + "capacity.pad", MOE + "router.kind"),
        lambda c: (
            not c.model.moe.capacity.per_device
            or (
                c.model.moe.capacity.factor > 0
                and not c.model.moe.capacity.pad
                and c.model.moe.router.kind != "expert_choice"
            )
        ),
        "a group of experts has no capacity, one expert of it would be padded to it, or experts choose by themselves",
        "set model.moe.capacity.per_device to false",
    ),
    simple_rule(
        "forced balance takes the place of the tokens' choice",
        (MOE + "router.force_balance", MOE + "router.kind"),
        lambda c: not c.model.moe.router.force_balance or c.model.moe.router.kind == "token_choice",
        "either the router chooses or nobody does",
        "set model.moe.router.force_balance to false, or model.moe.router.kind to token_choice",
    ),
    simple_rule(
        "looking ahead is said",
        (MOE + "router.kind", MOE + "router.looks_ahead"),
        lambda c: c.model.moe.router.kind == "token_choice" or c.model.moe.router.looks_ahead,
        "this router chooses for a token by looking at later ones, which a causal model cannot do when it writes",
        "set model.moe.router.looks_ahead to true to accept that, or model.moe.router.kind to token_choice",
    ),
    simple_rule(
        "routers that even out by themselves have no bias",
        (MOE + "router.kind", MOE + "balance.bias_rate", MOE + "router.groups"),
        lambda c: (
            c.model.moe.router.kind == "token_choice"
            or (c.model.moe.balance.bias_rate == 0 and c.model.moe.router.groups == 1)
        ),
        "only tokens that choose for themselves go by a bias or by groups",
        "set model.moe.balance.bias_rate to 0 and model.moe.router.groups to 1, or model.moe.router.kind to token_choice",
    ),
    simple_rule(
        "experts that choose are balanced",
        (MOE + "router.kind", MOE + "balance.aux_loss", MOE + "balance.device_loss", MOE + "capacity.pad"),
        lambda c: (
            c.model.moe.router.kind != "expert_choice"
            or not (c.model.moe.balance.aux_loss or c.model.moe.balance.device_loss or c.model.moe.capacity.pad)
        ),
        "experts that choose their tokens have even loads already",
        "set model.moe.balance.aux_loss, model.moe.balance.device_loss to 0 and model.moe.capacity.pad to false",
    ),
    simple_rule(
        "a softmax over the chosen is normalised over them",
        (MOE + "router.score", MOE + "router.normalize"),
        lambda c: c.model.moe.router.score != "softmax_chosen" or c.model.moe.router.normalize == "chosen",
        "a softmax over the chosen experts sums to one over them",
        "set model.moe.router.normalize to chosen, or model.moe.router.score to softmax",
    ),
    simple_rule(
        "a shared gate has shared experts",
        (MOE + "shared_gate", MOE + "shared_ffn"),
        lambda c: not c.model.moe.shared_gate or c.model.moe.shared_ffn > 0,
        "there are no shared experts to gate",
        "set model.moe.shared_ffn above 0, or model.moe.shared_gate to false",
    ),
    simple_rule(
        "further tokens lie within the sequence",
        ("model.mtp", "data.seq_len"),
        lambda c: c.model.mtp < c.data.seq_len,
        "no position has that many tokens behind it",
        lambda c: f"set model.mtp to at most {max(0, c.data.seq_len - 1)}",
    ),
]
