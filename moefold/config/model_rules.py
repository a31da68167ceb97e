"""Rules about the model alone: which of its mechanisms go together. A setting that would be ignored is refused."""

from __future__ import annotations

from moefold.config.rule import ConfigRule, divisors_in_words, simple_rule
from moefold.config.run import Config

ATTENTION, MOE, ROPE = "model.attention.", "model.moe.", "model.attention.rope."


def experts_per_group(c: Config) -> int:
    return c.model.moe.experts // c.model.moe.groups


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
        (MOE + "groups", MOE + "experts"),
        lambda c: c.model.moe.experts % c.model.moe.groups == 0,
        "experts do not split evenly into groups",
        lambda c: f"set model.moe.groups to one of {divisors_in_words(c.model.moe.experts)}",
    ),
    simple_rule(
        "chosen groups exist",
        (MOE + "groups_chosen", MOE + "groups"),
        lambda c: c.model.moe.groups_chosen <= c.model.moe.groups,
        "a token cannot choose from more groups than there are",
        lambda c: f"set model.moe.groups_chosen to at most {c.model.moe.groups}",
    ),
    simple_rule(
        "chosen groups hold enough experts",
        (MOE + "top_k", MOE + "groups_chosen", MOE + "groups", MOE + "experts"),
        lambda c: (
            c.model.moe.groups_chosen >= c.model.moe.groups
            or c.model.moe.experts % c.model.moe.groups > 0
            or c.model.moe.top_k > c.model.moe.experts
            or c.model.moe.top_k <= experts_per_group(c) * c.model.moe.groups_chosen
        ),
        "the groups a token may choose from hold fewer experts than it visits",
        lambda c: f"set model.moe.top_k to at most {max(1, experts_per_group(c) * c.model.moe.groups_chosen)}",
    ),
    simple_rule(
        "devices divide experts",
        (MOE + "devices", MOE + "experts"),
        lambda c: c.model.moe.experts % c.model.moe.devices == 0,
        "experts do not split evenly into groups",
        lambda c: f"set model.moe.devices to one of {divisors_in_words(c.model.moe.experts)}",
    ),
    simple_rule(
        "devices are for something",
        (MOE + "devices", MOE + "device_loss", MOE + "device_capacity"),
        lambda c: c.model.moe.devices == 1 or c.model.moe.device_loss > 0 or c.model.moe.device_capacity,
        "nothing looks at groups of experts",
        "set model.moe.device_loss above 0, such as 0.05, or model.moe.devices to 1",
    ),
    simple_rule(
        "device capacity is a capacity",
        (MOE + "device_capacity", MOE + "capacity_factor", MOE + "pad_to_capacity", MOE + "router"),
        lambda c: (
            not c.model.moe.device_capacity
            or (
                c.model.moe.capacity_factor > 0
                and not c.model.moe.pad_to_capacity
                and c.model.moe.router != "expert_choice"
            )
        ),
        "a group of experts has no capacity, one expert of it would be padded to it, or experts choose by themselves",
        "set model.moe.device_capacity to false",
    ),
    simple_rule(
        "forced balance takes the place of the tokens' choice",
        (MOE + "force_balance", MOE + "router"),
        lambda c: not c.model.moe.force_balance or c.model.moe.router == "token_choice",
        "either the router chooses or nobody does",
        "set model.moe.force_balance to false, or model.moe.router to token_choice",
    ),
    simple_rule(
        "looking ahead is said",
        (MOE + "router", MOE + "looks_ahead"),
        lambda c: c.model.moe.router == "token_choice" or c.model.moe.looks_ahead,
        "this router chooses for a token by looking at later ones, which a causal model cannot do when it writes",
        "set model.moe.looks_ahead to true to accept that, or model.moe.router to token_choice",
    ),
    simple_rule(
        "routers that even out by themselves have no bias",
        (MOE + "router", MOE + "bias_rate", MOE + "groups"),
        lambda c: c.model.moe.router == "token_choice" or (c.model.moe.bias_rate == 0 and c.model.moe.groups == 1),
        "only tokens that choose for themselves go by a bias or by groups",
        "set model.moe.bias_rate to 0 and model.moe.groups to 1, or model.moe.router to token_choice",
    ),
    simple_rule(
        "experts that choose are balanced",
        (MOE + "router", MOE + "aux_loss", MOE + "device_loss", MOE + "pad_to_capacity"),
        lambda c: (
            c.model.moe.router != "expert_choice"
            or not (c.model.moe.aux_loss or c.model.moe.device_loss or c.model.moe.pad_to_capacity)
        ),
        "experts that choose their tokens have even loads already",
        "set model.moe.aux_loss, model.moe.device_loss to 0 and model.moe.pad_to_capacity to false",
    ),
    simple_rule(
        "a softmax over the chosen is normalised over them",
        (MOE + "score", MOE + "normalize"),
        lambda c: c.model.moe.score != "softmax_chosen" or c.model.moe.normalize == "chosen",
        "a softmax over the chosen experts sums to one over them",
        "set model.moe.normalize to chosen, or model.moe.score to softmax",
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
