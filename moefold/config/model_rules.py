"""Rules about the model alone: which of its mechanisms go together. A setting that would be ignored is refused."""

from __future__ import annotations

from moefold.config.rule import Rule, divisors, rule
from moefold.config.run import Config

A, M, R = "model.attention.", "model.moe.", "model.attention.rope."


def group_size(c: Config) -> int:
    return c.model.moe.experts // c.model.moe.groups


MODEL: list[Rule] = [
    rule(
        "turning dims fit the head",
        (A + "rope_dim", A + "head_dim"),
        lambda c: c.model.attention.rope_dim % 2 == 0 and c.model.attention.rope_dim <= c.model.attention.head_dim,
        "dims turn in pairs, and no more of them than a head has",
        lambda c: f"set model.attention.rope_dim to an even number up to {c.model.attention.head_dim}, or 0 for all",
    ),
    rule(
        "mla has still and turning dims",
        (A + "kind", A + "rope_dim", A + "head_dim"),
        lambda c: c.model.attention.kind != "mla" or 0 < c.model.attention.rope_dim < c.model.attention.head_dim,
        "in mla some dims of a head turn by position and the others come from the latent",
        lambda c: f"set model.attention.rope_dim to {max(2, c.model.attention.head_dim // 4 * 2)}",
    ),
    rule(
        "mla has a key head for each query head",
        (A + "kind", A + "heads", A + "kv_heads"),
        lambda c: c.model.attention.kind != "mla" or c.model.attention.kv_heads == c.model.attention.heads,
        "mla makes keys and values for every head",
        lambda c: f"set model.attention.kv_heads to {c.model.attention.heads}",
    ),
    rule(
        "mla norms its latents only",
        (A + "kind", A + "qk_norm"),
        lambda c: c.model.attention.kind != "mla" or c.model.attention.qk_norm == "none",
        "mla has norms on its latents and none on queries and keys",
        "set model.attention.qk_norm to none",
    ),
    rule(
        "latents are mla's",
        (A + "kind", A + "q_rank", A + "value_dim"),
        lambda c: c.model.attention.kind == "mla" or not (c.model.attention.q_rank or c.model.attention.value_dim),
        "only mla has a latent for queries or values of another width",
        "set model.attention.kind to mla, or q_rank and value_dim to 0",
    ),
    rule(
        "full layers are for windows",
        (A + "full_every", A + "window"),
        lambda c: c.model.attention.full_every == 1 or c.model.attention.window > 0,
        "without a window every layer sees all",
        "set model.attention.full_every to 1, or model.attention.window above 0, such as 128",
    ),
    rule(
        "groups divide experts",
        (M + "groups", M + "experts"),
        lambda c: c.model.moe.experts % c.model.moe.groups == 0,
        "experts do not split evenly into groups",
        lambda c: f"set model.moe.groups to one of {divisors(c.model.moe.experts)}",
    ),
    rule(
        "chosen groups exist",
        (M + "groups_chosen", M + "groups"),
        lambda c: c.model.moe.groups_chosen <= c.model.moe.groups,
        "a token cannot choose from more groups than there are",
        lambda c: f"set model.moe.groups_chosen to at most {c.model.moe.groups}",
    ),
    rule(
        "chosen groups hold enough experts",
        (M + "top_k", M + "groups_chosen", M + "groups", M + "experts"),
        lambda c: (
            c.model.moe.groups_chosen >= c.model.moe.groups
            or c.model.moe.top_k > c.model.moe.experts
            or c.model.moe.top_k <= group_size(c) * c.model.moe.groups_chosen
        ),
        "the groups a token may choose from hold fewer experts than it visits",
        lambda c: f"set model.moe.top_k to at most {max(1, group_size(c) * c.model.moe.groups_chosen)}",
    ),
    rule(
        "devices divide experts",
        (M + "devices", M + "experts"),
        lambda c: c.model.moe.experts % c.model.moe.devices == 0,
        "experts do not split evenly into groups",
        lambda c: f"set model.moe.devices to one of {divisors(c.model.moe.experts)}",
    ),
    rule(
        "device capacity is a capacity",
        (M + "device_capacity", M + "capacity_factor", M + "pad_to_capacity"),
        lambda c: (
            not c.model.moe.device_capacity or (c.model.moe.capacity_factor > 0 and not c.model.moe.pad_to_capacity)
        ),
        "a group of experts has no capacity, or one expert of it would be padded to it",
        "set model.moe.capacity_factor above 0, such as 1.25, and model.moe.pad_to_capacity to false",
    ),
    rule(
        "looking ahead is said",
        (M + "router", M + "looks_ahead"),
        lambda c: c.model.moe.router == "token_choice" or c.model.moe.looks_ahead,
        "this router chooses for a token by looking at later ones, which a causal model cannot do when it writes",
        "set model.moe.looks_ahead to true to accept that, or model.moe.router to token_choice",
    ),
    rule(
        "routers that even out by themselves have no bias",
        (M + "router", M + "bias_rate", M + "groups"),
        lambda c: c.model.moe.router == "token_choice" or (c.model.moe.bias_rate == 0 and c.model.moe.groups == 1),
        "only tokens that choose for themselves go by a bias or by groups",
        "set model.moe.bias_rate to 0 and model.moe.groups to 1, or model.moe.router to token_choice",
    ),
    rule(
        "experts that choose are balanced",
        (M + "router", M + "aux_loss", M + "device_loss", M + "pad_to_capacity", M + "force_balance"),
        lambda c: (
            c.model.moe.router != "expert_choice"
            or not (
                c.model.moe.aux_loss
                or c.model.moe.device_loss
                or c.model.moe.pad_to_capacity
                or c.model.moe.force_balance
            )
        ),
        "experts that choose their tokens have even loads already",
        "set model.moe.aux_loss, device_loss to 0 and pad_to_capacity, force_balance to false",
    ),
    rule(
        "a softmax over the chosen is normalised over them",
        (M + "score", M + "normalize"),
        lambda c: c.model.moe.score != "softmax_chosen" or c.model.moe.normalize == "chosen",
        "a softmax over the chosen experts sums to one over them",
        "set model.moe.normalize to chosen, or model.moe.score to softmax",
    ),
    rule(
        "a shared gate has shared experts",
        (M + "shared_gate", M + "shared_ffn"),
        lambda c: not c.model.moe.shared_gate or c.model.moe.shared_ffn > 0,
        "there are no shared experts to gate",
        "set model.moe.shared_ffn above 0, or model.moe.shared_gate to false",
    ),
    rule(
        "further tokens lie within the sequence",
        ("model.mtp", "data.seq_len"),
        lambda c: c.model.mtp < c.data.seq_len,
        "no position has that many tokens behind it",
        lambda c: f"set model.mtp to at most {max(0, c.data.seq_len - 1)}",
    ),
]
