"""Tensors that moefold's layers save for backward, and their working sets.

A test compares the tables with the tensors that autograd saves in a real model. Saved tensors depend on the chosen
implementation of an op: the fused expert kernel saves tokens and pre-activations only; on a CPU, RMSNorm is composed of
plain ops that each save their input, and attention of unusual shapes saves its probabilities.
"""

from __future__ import annotations

from moefold.anatomy.activations import activation_op, shared_activation
from moefold.kernels.attention.backward_parts import backward_workspace
from moefold.kernels.attention.workspace import HOPPER_WIDTHS
from moefold.kernels.catalog import forced_implementations
from moefold.plan.layer.fp8_tensors import (
    FP8_EXPERT_BACKWARD,
    FP8_EXPERT_FORWARD,
    add_expert_preactivation,
    add_input_copies,
    add_product_input,
    add_recomputed_activation,
    fp8_product_backward,
    held_experts,
)
from moefold.plan.layer.rank_shapes import EXPERT_PRODUCTS, RankShapes
from moefold.plan.layer.ring_blocks import add_ring_backward, add_ring_forward
from moefold.plan.layer.tensor_table import (
    LayerStack,
    ShapeCondition,
    ShapeFunction,
    TensorEntry,
    TensorTable,
    WorkingSet,
    arrived_tokens,
    attended_width,
    context_tokens,
    dense_inner_width,
    dense_preactivation_width,
    dispatched_token_width,
    expert_count,
    expert_inner_width,
    expert_preactivation_width,
    expert_rows,
    expert_weight_rows,
    joined_token_width,
    key_latent_width,
    one_column,
    qkv_width,
    query_heads,
    query_latent_width,
    rank_tokens,
    separate_expert_wgrad,
    shared_inner_width,
    shared_preactivation_width,
    stream_width,
    two_columns,
    uses_gqa,
    uses_mla,
    vocab_shard_width,
    weighs_expert_outputs,
)

CHUNK_LOGITS = 1 << 26  # both as in kernels/vocabulary/cross_entropy.py; a test compares
LOGITS_IN_PLACE = 10 << 26
EXPERT_PADDING_ROWS = 64  # padding rows of the fused kernel, per expert
SINK_HEAD_DIMS = 8  # dims added to queries and keys where a sink is an additional key
HOPPER_CAPABILITY = 90

# Products that read one input and are called as one op.
QKV = ("attention.query", "attention.key", "attention.value")
LATENT_DOWN = ("attention.query_down", "attention.latent", "attention.turning")
LATENT_UP = ("attention.key", "attention.value")
DENSE_UP = ("dense.gate_up", "dense.up")
SHARED_UP = ("moe.shared.gate_up", "moe.shared.up")
UP_PRODUCT, DOWN_PRODUCT = EXPERT_PRODUCTS


def add_rmsnorm(
    table: TensorTable,
    name: str,
    rows: ShapeFunction,
    width: ShapeFunction,
    inside: tuple[str, ...] = (),
    made_by: tuple[str, ...] = (),
    layer_input: bool = False,
) -> None:
    """Add the tensors of an RMSNorm: its input and one number per row. `inside`: regions that begin with the norm, and
    keep its input alone; `made_by`: regions whose output that is."""
    read = table.read_by("norm", *inside)
    source = read.remade_by(*made_by, *table.regions)
    source.add(name, rows, width, layer_input=layer_input)
    own = read.remade_by(*inside, *table.regions)
    own.add(f"scale of {name}", rows, one_column, "fp32")


def recomputes(region: str) -> ShapeCondition:
    def is_recomputed(s: RankShapes) -> bool:
        return region in s.choices.recomputed

    return is_recomputed


recomputes_up = recomputes("up")
recomputes_core = recomputes("core")
recomputes_experts = recomputes("experts")
recomputes_dispatch = recomputes("dispatch")


def is_on_cpu(s: RankShapes) -> bool:
    return s.choices.device == "cpu"


# Attention.


def norms_and_ropes_in_one_op(s: RankShapes) -> bool:
    """Whether queries and keys are normed and rotated by one op, fused or composed."""
    attention = s.model.attention
    if s.mla or attention.qk_norm == "none":
        return False
    rotates_whole_head = attention.rope_dim in (0, attention.head_dim)
    norm_is_local = attention.qk_norm == "head" or s.portion.tp == 1
    return rotates_whole_head and norm_is_local


def fuses_norm_and_rope(s: RankShapes) -> bool:
    """Whether one kernel norms and rotates queries and keys; it saves its input only."""
    if not norms_and_ropes_in_one_op(s):
        return False
    return s.chosen_implementation("norm_rope") != "reference"


def norms_each_head(s: RankShapes) -> bool:
    return s.qk_norm == "head" and not fuses_norm_and_rope(s)


def norms_all_heads(s: RankShapes) -> bool:
    return s.qk_norm == "full" and not fuses_norm_and_rope(s)


def has_query_latent(s: RankShapes) -> bool:
    return s.mla and s.q_rank > 0


def latents_width(s: RankShapes) -> float:
    query = s.q_rank or s.D
    return query + s.kv_rank + s.rope


def all_query_heads(s: RankShapes) -> float:
    return s.C * s.H


def all_key_heads(s: RankShapes) -> float:
    return s.C * s.projected_kv_heads


def head_width(s: RankShapes) -> float:
    return s.Q


def query_width(s: RankShapes) -> float:
    return s.H * s.Q


def key_width(s: RankShapes) -> float:
    return s.projected_kv_heads * s.Q


def sink_key_count(s: RankShapes) -> int:
    """Additional keys for a sink: one where attention is composed, which also adds eight dims to queries and keys; none
    where a kernel has sinks."""
    composed = s.choices.device == "cpu"
    has_sinks = s.model.attention.sinks
    added = has_sinks and composed and not recomputes_core(s)
    return 1 if added else 0


def saved_head_width(s: RankShapes) -> float:
    return s.Q + SINK_HEAD_DIMS * sink_key_count(s)


def saved_query_width(s: RankShapes) -> float:
    return s.H * saved_head_width(s)


def saved_key_positions(s: RankShapes) -> float:
    """Positions of saved keys and values; with an all-gather over cp, those of all cp ranks."""
    gathers = s.portion.context == "all_gather"
    keeps_gathered = gathers and not recomputes_core(s)
    copies = s.portion.cp if keeps_gathered else 1
    gathered = s.C * copies
    return gathered + s.B * sink_key_count(s)


def saved_kv_heads(s: RankShapes) -> float:
    """Heads of saved keys and values; one per query head where attention is composed of plain ops, and copies where
    fewer heads than ranks are swapped."""
    if recomputes_core(s):
        return s.G
    return s.H if s.plain_attention else s.G * s.kv_copies


def saved_key_width(s: RankShapes) -> float:
    return saved_kv_heads(s) * saved_head_width(s)


def saved_value_width(s: RankShapes) -> float:
    return saved_kv_heads(s) * s.V


def cuts_context(s: RankShapes) -> bool:
    return s.portion.cp > 1


def reorders_attended(s: RankShapes) -> bool:
    """Whether the output of attention is computed in parts, or by heads, and copied into order."""
    return cuts_context(s) and s.portion.context != "ring"


def swaps_heads(s: RankShapes) -> bool:
    """Whether the result of attention is swapped from heads back to positions: nothing else has a region `swap`."""
    return cuts_context(s) and s.portion.context in ("all_to_all", "hierarchical") and not swaps_in_projections(s)


def swaps_in_projections(s: RankShapes) -> bool:
    """Whether heads arrive inside the projection back, which keeps a copy of them."""
    return s.portion.head_tiles


def swaps_no_heads(s: RankShapes) -> bool:
    return not (swaps_heads(s) or swaps_in_projections(s))


def cuts_rotary_tables(s: RankShapes) -> bool:
    """Whether a rank rotates some positions of its sequences, by a copy of their angles."""
    return cuts_context(s) and not swaps_in_projections(s)


def context_positions(s: RankShapes) -> float:
    return s.S / s.portion.cp


def half_chunk_positions(s: RankShapes) -> float:
    """Positions of one of a rank's two chunks, with context parallelism."""
    return s.S / (2 * s.portion.cp)


def chunk_mask_width(s: RankShapes) -> float:
    return s.S + half_chunk_positions(s)


def needs_chunk_masks(s: RankShapes) -> bool:
    """Whether chunks need a mask over gathered keys: only where no kernel has a causal offset."""
    if not cuts_context(s) or not is_on_cpu(s):
        return False
    return s.portion.context == "all_gather"


def rope_table_width(s: RankShapes) -> float:
    """Width of the saved RoPE tables: once where queries and keys are rotated by one op, else twice."""
    attention = s.model.attention
    rotated = attention.rope_dim or attention.head_dim
    readers = 1 if norms_and_ropes_in_one_op(s) else 2
    return rotated * readers


def uses_plain_attention(s: RankShapes) -> bool:
    return s.plain_attention


def uses_flash_attention(s: RankShapes) -> bool:
    return not s.plain_attention


def probabilities_width(s: RankShapes) -> float:
    keys = s.S + sink_key_count(s)
    return s.H * keys


def keeps_attended(s: RankShapes) -> bool:
    """Whether attention keeps its output beside the copy in FP8 that the output projection keeps."""
    if s.plain_attention or reorders_attended(s):
        return False
    return not s.products.keeps_input(("attention.out",))


def reads_its_output(s: RankShapes) -> bool:
    """Whether attention's backward reads the output that the output projection reads."""
    return uses_flash_attention(s) and not reorders_attended(s)


def leaves_its_output(s: RankShapes) -> bool:
    return not reads_its_output(s)


def keeps_latents(s: RankShapes) -> bool:
    return s.products.keeps_input(("attention.query", *LATENT_UP))


def query_source_width(s: RankShapes) -> float:
    return s.q_rank or s.D


def add_full_norm(table: TensorTable, name: str, width: ShapeFunction) -> None:
    """Add the tensors of a norm over all heads, which is composed of plain ops in fp32, since tp may shard it."""
    table = table.read_by("norm")
    table.add(f"{name} in fp32", context_tokens, width, "fp32")
    table.add(f"{name} scaled", context_tokens, width, "fp32")
    table.add(f"scale of {name}", context_tokens, one_column, "fp32")


def attends_to_norm_outputs(s: RankShapes) -> bool:
    """Whether attention saves the queries and keys that a norm returned, and not copies of them."""
    if not norms_and_ropes_in_one_op(s):
        return False
    adds_key = sink_key_count(s) > 0
    makes_copies = s.plain_attention or adds_key or reorders_attended(s)
    return recomputes_core(s) or not makes_copies


def attends_to_others(s: RankShapes) -> bool:
    return not attends_to_norm_outputs(s)


def add_queries_and_keys(table: TensorTable) -> None:
    core = table.read_by("core")
    core.add("queries", context_tokens, saved_query_width)
    core.add("keys", saved_key_positions, saved_key_width)


def add_values(table: TensorTable) -> None:
    core = table.read_by("core")
    core.add("values", saved_key_positions, saved_value_width)


def keeps_rotary_keys(s: RankShapes) -> bool:
    """Whether the rotary part of the keys is kept by itself, as an input of the region of projections up."""
    return s.mla and recomputes_up(s)


def keeps_query_source(s: RankShapes) -> bool:
    """Whether the region of projections up keeps normed tokens that the projections down do not keep."""
    down_keeps = s.products.keeps_input(LATENT_DOWN)
    return keeps_rotary_keys(s) and not s.q_rank and not down_keeps


def rotary_width(s: RankShapes) -> float:
    return s.rope


def attend_tensors() -> list[TensorEntry]:
    table = TensorTable("attend")
    mla = table.only(uses_mla)
    gqa = table.only(uses_gqa)
    # Inputs of the projections.
    add_rmsnorm(table, "stream", rank_tokens, stream_width, layer_input=True)
    add_product_input(gqa, "normed", context_tokens, stream_width, QKV, made_by=("norm",))
    add_product_input(mla, "normed", rank_tokens, stream_width, LATENT_DOWN, made_by=("norm",))
    # Latents: the region of projections up begins with their norms.
    query_latent = table.only(has_query_latent)
    add_rmsnorm(query_latent, "query latent", rank_tokens, query_latent_width, inside=("up",))
    add_rmsnorm(mla, "key latent", rank_tokens, key_latent_width, inside=("up",))
    up = mla.remade_by("up")
    inside_up = up.read_by("up")
    latents = inside_up.only(keeps_latents)
    latents.add("latents", context_tokens, latents_width, "linear")
    add_input_copies(inside_up, "query latents", context_tokens, query_source_width, ("attention.query",))
    add_input_copies(inside_up, "key latents", context_tokens, key_latent_width, LATENT_UP)
    rotary = mla.only(keeps_rotary_keys)
    rotary.add("rotary part of keys", rank_tokens, rotary_width)
    source = mla.only(keeps_query_source).remade_by("norm")
    source.add("normed, for queries", rank_tokens, stream_width)
    # Norms of queries and keys: by head, fused with RoPE, or over all heads.
    by_head = table.only(norms_each_head)
    add_rmsnorm(by_head, "query", all_query_heads, head_width)
    add_rmsnorm(by_head, "key", all_key_heads, head_width)
    fused = table.only(fuses_norm_and_rope).read_by("norm")
    fused.add("query", context_tokens, query_width)
    fused.add("key", context_tokens, key_width)
    all_heads = table.only(norms_all_heads)
    add_full_norm(all_heads, "query", query_width)
    add_full_norm(all_heads, "key", key_width)
    # Attention's inputs and outputs.
    add_queries_and_keys(up)
    add_values(up)
    norm_outputs = gqa.only(attends_to_norm_outputs)
    add_queries_and_keys(norm_outputs.remade_by("norm"))
    add_queries_and_keys(gqa.only(attends_to_others))
    add_values(gqa)
    core = table.remade_by("core").read_by("core")
    out = ("attention.out",)
    projected = table.read_by("out")
    read_again = projected.only(reads_its_output).read_by("core")
    left = projected.only(leaves_its_output)
    for attended in (read_again, left.only(swaps_no_heads)):
        add_product_input(attended, "attended", context_tokens, attended_width, out, made_by=("core",))
    swapped = left.only(swaps_heads)
    add_product_input(swapped, "attended", context_tokens, attended_width, out, made_by=("core", "swap"))
    add_product_input(left.only(swaps_in_projections), "attended", context_tokens, attended_width, out)
    kept = core.only(keeps_attended)
    kept.add("attended", context_tokens, attended_width)
    reordered = core.only(reorders_attended)
    reordered.add("attended, before reordering", context_tokens, attended_width)
    for heads in (up, gqa):
        cut = heads.only(cuts_rotary_tables)
        cut.add("rotary tables", context_positions, rope_table_width, "fp32")
    masks = core.only(needs_chunk_masks)
    masks.add("masks of the two chunks", half_chunk_positions, chunk_mask_width, "fp32")
    flash = core.only(uses_flash_attention)
    flash.add("log-sum-exp", context_tokens, query_heads, "fp32")
    plain = core.only(uses_plain_attention)
    plain.add("probabilities", context_tokens, probabilities_width, "fp32")
    return table.entries


def mlp_tensors() -> list[TensorEntry]:
    table = TensorTable("mlp")
    add_rmsnorm(table, "stream", rank_tokens, stream_width, inside=("mlp",))
    mlp = table.remade_by("mlp")
    add_product_input(mlp, "normed", context_tokens, stream_width, DENSE_UP, made_by=("norm",))
    mlp.add("pre-activation", context_tokens, dense_preactivation_width)
    add_product_input(mlp, "activated", context_tokens, dense_inner_width, ("dense.down",))
    return table.entries


# The router.


def fused_router(s: RankShapes) -> bool:
    """Whether the router is one kernel, which saves logits, choices and weights."""
    return s.chosen_implementation("router_topk") == "triton"


def composed_router(s: RankShapes) -> bool:
    return not fused_router(s)


def weight_normalization(s: RankShapes) -> str:
    router = s.model.moe.router
    if router.score == "softmax_chosen":
        return "chosen"
    return router.normalize


def normalizes_chosen(s: RankShapes) -> bool:
    return weight_normalization(s) == "chosen" and composed_router(s)


def has_balance_loss(s: RankShapes) -> bool:
    balance = s.model.moe.balance
    return bool(balance.aux_loss or balance.device_loss)


def has_z_loss(s: RankShapes) -> bool:
    return s.model.moe.balance.z_loss > 0


def balance_loss_rows(s: RankShapes) -> float:
    """Rows of the load shares in the balance losses: one per sequence, or one for the batch."""
    by_sequence = s.model.moe.balance.aux_over == "sequence"
    return s.B if by_sequence else 1.0


def keeps_score_shares(s: RankShapes) -> bool:
    """Whether scores normalised over all experts are saved, for balance losses or as weights."""
    if fused_router(s):
        return False
    normalization = weight_normalization(s)
    if normalization == "all" or has_balance_loss(s):
        return True
    score = s.model.moe.router.score
    return normalization == "none" and score == "softmax"


def composes_sigmoids(s: RankShapes) -> bool:
    score = s.model.moe.router.score
    return score == "sigmoid" and composed_router(s)


def keeps_log_sigmoids(s: RankShapes) -> bool:
    if not composes_sigmoids(s):
        return False
    return keeps_score_shares(s) or normalizes_chosen(s)


def keeps_logits(s: RankShapes) -> bool:
    if fused_router(s) or has_z_loss(s):
        return True
    return keeps_log_sigmoids(s) or normalizes_chosen(s)


def keeps_sigmoids(s: RankShapes) -> bool:
    return composes_sigmoids(s) and weight_normalization(s) == "none"


def keeps_chosen_weights(s: RankShapes) -> bool:
    return normalizes_chosen(s) or fused_router(s)


def choices_per_token(s: RankShapes) -> float:
    return s.K


def route_tensors() -> list[TensorEntry]:
    table = TensorTable("route")
    add_rmsnorm(table, "stream", rank_tokens, stream_width, inside=("moe",))
    normed = table.remade_by("norm", "moe").read_by("shared")
    kept = normed.only(experts_keep_normed).read_by("experts")
    kept.add("normed", rank_tokens, stream_width)
    left = normed.only(experts_leave_normed)
    left.add("normed", rank_tokens, stream_width)
    # Scores of all experts.
    router = table.remade_by("moe")
    composed = router.only(composed_router)
    log_sigmoids = router.only(keeps_log_sigmoids)
    logits = router.only(keeps_logits)
    logits.add("logits", rank_tokens, expert_count, "fp32")
    shares = router.only(keeps_score_shares)
    shares.add("shares", rank_tokens, expert_count, "fp32")
    sigmoids = router.only(keeps_sigmoids)
    sigmoids.add("sigmoids", rank_tokens, expert_count, "fp32")
    chosen = log_sigmoids.only(normalizes_chosen)
    chosen.add("log-sigmoids", rank_tokens, expert_count, "fp32")
    gradients = log_sigmoids.only(is_on_cpu)
    gradients.add("buffer of log-sigmoids", rank_tokens, expert_count, "fp32")
    # The choice, its weights and the losses.
    router.add("choice", rank_tokens, choices_per_token, "int64")
    composed.add("mask of missing choices", rank_tokens, choices_per_token, "byte")
    weights = router.only(keeps_chosen_weights)
    weights.add("weights", rank_tokens, choices_per_token, "fp32")
    balance = router.only(has_balance_loss)
    balance.add("load share of each expert", balance_loss_rows, expert_count, "fp32")
    z_loss = composed.only(has_z_loss)
    z_loss.add("log-sum-exp", rank_tokens, one_column, "fp32")
    return table.entries


# Experts.


def reference_arrange_rows(s: RankShapes) -> bool:
    if s.portion.ep > 1:
        return True
    return s.chosen_implementation("arrange_rows") == "reference"


def kernel_arranges_rows(s: RankShapes) -> bool:
    """Whether a kernel arranges the rows: its backward keeps their slots."""
    return not reference_arrange_rows(s)


def fused_experts(s: RankShapes) -> bool:
    """Whether one function runs the experts."""
    return s.fuses_experts


def plain_fused_experts(s: RankShapes) -> bool:
    """Whether one kernel runs the experts in bf16; its backward overwrites gate and up with their gradients."""
    return s.fuses_experts and not s.fuses_fp8_experts


def experts_outside_fp8(s: RankShapes) -> bool:
    return not s.fuses_fp8_experts


def unfused_experts(s: RankShapes) -> bool:
    return not s.fuses_experts


def keeps_expert_tokens(s: RankShapes) -> bool:
    """Whether the experts keep the tokens that they gather rows from, or rebuild rows from them."""
    return s.fuses_experts or recomputes_experts(s) or recomputes_dispatch(s)


def experts_are_remote(s: RankShapes) -> bool:
    return s.portion.ep * s.portion.etp > 1


def experts_keep_normed(s: RankShapes) -> bool:
    """Whether the tokens that the experts keep are those that the router reads."""
    if s.latent or experts_are_remote(s):
        return False
    return keeps_expert_tokens(s)


def experts_leave_normed(s: RankShapes) -> bool:
    return not experts_keep_normed(s)


def has_local_latents(s: RankShapes) -> bool:
    return s.latent and not experts_are_remote(s)


def keeps_sent_latents(s: RankShapes) -> bool:
    """Whether latents are kept to be sent again."""
    return s.latent and experts_are_remote(s) and recomputes_dispatch(s)


def has_expert_biases(s: RankShapes) -> bool:
    return s.model.moe.biases


def weighs_activations(s: RankShapes) -> bool:
    return s.gate_inside


def rounds_router_weights(s: RankShapes) -> bool:
    return not is_on_cpu(s)


def routed_choices(s: RankShapes) -> float:
    return s.T * s.K


def plan_tensors() -> list[TensorEntry]:
    table = TensorTable("plan")
    moe = table.remade_by("moe")
    arranged = moe.only(reference_arrange_rows)
    arranged.add("order of rows", expert_rows, one_column, "int64")
    by_kernel = moe.only(kernel_arranges_rows)
    by_kernel.add("slots", expert_rows, one_column, "int32")
    remote = moe.only(experts_are_remote)
    remote.add("token and slot of each parcel", routed_choices, two_columns, "int64")
    return table.entries


def has_clone_slots(s: RankShapes) -> bool:
    return s.portion.clone_slots > 0


def clone_weight_rows(s: RankShapes) -> float:
    """Rows of up, gate and down of the experts in spare slots."""
    matrices = s.expert_parts + 1
    return s.portion.clone_slots * matrices * s.F


def dispatch_tensors() -> list[TensorEntry]:
    table = TensorTable("dispatch")
    clones = table.only(has_clone_slots)
    clones.add("weights of clones", clone_weight_rows, dispatched_token_width)
    latents = table.remade_by("moe").only(keeps_sent_latents)
    latents.add("latents", rank_tokens, dispatched_token_width)
    return table.entries


def expert_tensors() -> list[TensorEntry]:
    table = TensorTable("experts")
    experts = table.remade_by("experts", "moe")
    unfused = experts.only(unfused_experts)
    # Inputs: the fused kernel reads tokens by index, other kernels read gathered rows. The region of all experts keeps
    # its inputs.
    inputs = table.remade_by("moe")
    tokens = inputs.only(keeps_expert_tokens).read_by("experts")
    remote = tokens.only(experts_are_remote).remade_by("dispatch", *tokens.regions)
    remote.add("arrived tokens", arrived_tokens, dispatched_token_width)
    local = tokens.only(has_local_latents)
    local.add("latents", rank_tokens, dispatched_token_width)
    inputs.add("index", expert_rows, one_column, "int32")
    arranged = inputs.only(reference_arrange_rows)
    arranged.add("slots", expert_rows, one_column, "int32")
    weights = inputs.read_by("activation")
    weights.add("weights", expert_rows, one_column, "fp32")
    up = (UP_PRODUCT,)
    made_by = ("dispatch",)
    add_product_input(unfused, "rows", expert_rows, dispatched_token_width, up, made_by=made_by, experts=held_experts)
    # Inside and after the expert MLP.
    wide = experts.only(experts_outside_fp8).read_by("activation")
    wide.add("pre-activation", expert_rows, expert_preactivation_width)
    add_expert_preactivation(experts)
    add_product_input(
        unfused,
        "activated",
        expert_rows,
        expert_inner_width,
        (DOWN_PRODUCT,),
        made_by=("activation",),
        experts=held_experts,
    )
    weighed = experts.only(weighs_expert_outputs)
    weighed.add("results", expert_rows, dispatched_token_width)
    rounded = weighed.only(rounds_router_weights)
    rounded.add("weights, rounded", expert_rows, one_column)
    biased = experts.only(has_expert_biases)
    biased.add("expert of each row, twice", expert_rows, two_columns, "int64")
    weighed_biases = biased.only(weighs_activations)
    weighed_biases.add("biases of rows", expert_rows, dispatched_token_width)
    return table.entries


def widen_tensors() -> list[TensorEntry]:
    widen = TensorTable("widen")
    latents = widen.remade_by("moe")
    add_product_input(latents, "results in latents", rank_tokens, dispatched_token_width, ("moe.widen",))
    narrow = TensorTable("narrow")
    tokens = narrow.remade_by("moe")
    add_input_copies(tokens, "normed", rank_tokens, stream_width, ("moe.narrow",))
    return widen.entries + narrow.entries


def cuts_tokens_over_tp(s: RankShapes) -> bool:
    return s.portion.tp > 1


def gates_shared_experts(s: RankShapes) -> bool:
    return s.model.moe.shared_gate


def keeps_shared_input(s: RankShapes) -> bool:
    return s.products.keeps_input(SHARED_UP)


def shared_expert_tensors() -> list[TensorEntry]:
    table = TensorTable("shared")
    shared = table.remade_by("shared", "moe")
    gathered = shared.only(cuts_tokens_over_tp).remade_by("norm", *shared.regions)
    whole = gathered.only(keeps_shared_input)
    whole.add("normed, gathered", context_tokens, stream_width, "linear")
    add_input_copies(shared, "normed", context_tokens, stream_width, SHARED_UP)
    shared.add("pre-activation", context_tokens, shared_preactivation_width)
    add_product_input(shared, "activated", context_tokens, shared_inner_width, ("moe.shared.down",))
    gated = shared.only(gates_shared_experts)
    gated.add("results", rank_tokens, stream_width)
    gated.add("gates", rank_tokens, one_column)
    return table.entries


# The embedding and the head.


def prediction_heads(s: RankShapes) -> float:
    """Number of losses: one of the next token, and one per MTP layer."""
    return 1.0 + s.model.mtp


def all_streams_width(s: RankShapes) -> float:
    return s.D * prediction_heads(s)


def embed_tensors() -> list[TensorEntry]:
    embed = TensorTable("embed")
    embed.add("tokens", context_tokens, one_column, "int64")
    ahead = TensorTable("look_ahead")
    ahead.add("tokens", context_tokens, one_column, "int64")
    add_rmsnorm(ahead, "normed stream", rank_tokens, stream_width, made_by=("norm",))
    add_rmsnorm(ahead, "token", rank_tokens, stream_width)
    add_product_input(ahead, "stream and token joined", rank_tokens, joined_token_width, ("join",))
    return embed.entries + ahead.entries


def head_tensors() -> list[TensorEntry]:
    aside = TensorTable("set_aside")
    add_rmsnorm(aside, "stream", rank_tokens, stream_width)
    head = TensorTable("predict")
    add_rmsnorm(head, "stream", rank_tokens, stream_width)
    head.add("gradient of streams", context_tokens, all_streams_width)
    head.add("gradient of the head", vocab_shard_width, all_streams_width, "fp32")
    return aside.entries + head.entries


MOEFOLD_SAVED = [
    *attend_tensors(),
    *mlp_tensors(),
    *route_tensors(),
    *plan_tensors(),
    *dispatch_tensors(),
    *expert_tensors(),
    *widen_tensors(),
    *shared_expert_tensors(),
    *embed_tensors(),
    *head_tensors(),
]


# Tensors held for deferred weight gradients, beside inputs that are saved as such and gradients of outputs.


def holds_routed_tokens(s: RankShapes) -> bool:
    """Whether a deferred weight gradient reads the normed tokens of the router: that of the projection to latents, of
    shared experts, or of the fused kernel on tokens of this rank."""
    if s.latent and s.products.keeps_input(("moe.narrow",)):
        return True
    moe = s.model.moe
    reads_normed = keeps_shared_input(s) and not cuts_tokens_over_tp(s)
    if moe.shared_ffn and (moe.shared_gate or reads_normed):
        return True
    return not s.latent and s.fuses_experts and not experts_are_remote(s)


def unrotated_latents_width(s: RankShapes) -> float:
    return latents_width(s) - s.rope


def holds_latent_gradient(s: RankShapes) -> bool:
    return s.mla and s.products.keeps_input(("attention.turning",))


def waiting_tensors() -> list[TensorEntry]:
    # The gradient of the rotary key is a part of that of all latents, which is held whole.
    attend = TensorTable("attend")
    mla = attend.only(holds_latent_gradient)
    mla.add("gradient of latents", rank_tokens, unrotated_latents_width)
    route = TensorTable("route")
    tokens = route.only(holds_routed_tokens)
    tokens.add("normed", rank_tokens, stream_width)
    # The fused kernel has computed the activation again, and gathers rows only with the weight gradient.
    experts = TensorTable("experts")
    fused = experts.only(fused_experts)
    plain = fused.only(experts_outside_fp8)
    plain.add("activation, recomputed", padded_expert_rows, expert_inner_width)
    add_recomputed_activation(fused)
    fused.add("index", expert_rows, one_column, "int32")
    remote = fused.only(experts_are_remote)
    remote.add("arrived tokens", arrived_tokens, dispatched_token_width)
    local = fused.only(has_local_latents)
    local.add("latents", rank_tokens, dispatched_token_width)
    return attend.entries + route.entries + experts.entries


# Working sets: temporary tensors of a step, beside saved ones.


def backward_table() -> TensorTable:
    table = TensorTable()
    table.add("gradient of the stream", rank_tokens, stream_width)
    return table


def writes_score_gradients(s: RankShapes) -> bool:
    """Whether attention's backward stores the gradients of its scores, as its kernels for Hopper do."""
    attention = s.model.attention
    choices = s.choices
    if cuts_context(s):
        return False
    if attention.window or attention.sinks:
        return False
    if (s.Q, s.V) not in HOPPER_WIDTHS or choices.precision == "fp32":
        return False
    forced = forced_implementations(s.portion.force).get("attention")
    if forced not in (None, "deterministic"):
        return False
    if choices.device != "cuda" or choices.capability != HOPPER_CAPABILITY:
        return False
    return score_gradient_workspace(s) > 0


def score_gradient_workspace(s: RankShapes) -> float:
    """Bytes of the gradients of scores, of as many heads as the kernel's limit allows, or of parts with their sums; 0
    where the kernels do not run."""
    sequences = int(s.B)
    kv_heads = int(s.G)
    heads_per_group = int(s.H // s.G)
    widths = (int(s.Q), int(s.V))
    return backward_workspace(s.S, sequences, kv_heads, heads_per_group, *widths)


def padded_expert_rows(s: RankShapes) -> float:
    if not s.fuses_experts:
        return s.R
    return s.R + EXPERT_PADDING_ROWS * s.e


def expert_weight_width(s: RankShapes) -> float:
    return (s.expert_parts + 1) * s.F


def overwrites_logits(s: RankShapes) -> bool:
    """Whether the kernel of the head overwrites logits with their gradient, in bf16."""
    return s.chosen_implementation("cross_entropy") == "triton"


def keeps_logits_apart(s: RankShapes) -> bool:
    return not overwrites_logits(s)


def logits_per_chunk(s: RankShapes) -> float:
    """Logits of one chunk of tokens in the head. The number of tokens is a power of two; it is larger for the kernel
    that overwrites logits, which needs fewer bytes per logit."""
    limit = LOGITS_IN_PLACE if overwrites_logits(s) else CHUNK_LOGITS
    chunk = tokens_of_chunk(limit, s.P)
    return min(chunk, s.C) * s.P


def tokens_of_chunk(logits: int, vocab: float) -> int:
    most = int(logits // vocab)
    exponent = most.bit_length() - 1
    return 1 << max(0, exponent)


def attention_gradient_width(s: RankShapes) -> float:
    return qkv_width(s) + attended_width(s)


def rotated_gradient_width(s: RankShapes) -> float:
    return 2 * query_width(s)


def two_streams_width(s: RankShapes) -> float:
    return 2 * s.D


def expert_activation_parts(s: RankShapes) -> int:
    return s.expert_parts


def shared_activation_parts(s: RankShapes) -> int:
    return s.shared_parts


def dense_activation_parts(s: RankShapes) -> int:
    return s.dense_parts


def fuses_activation(activation: str, s: RankShapes) -> bool:
    """Whether the activation's backward is one kernel."""
    op = activation_op(activation)
    return s.chosen_implementation(op) == "triton"


def fuses_expert_activation(s: RankShapes) -> bool:
    return fuses_activation(s.model.moe.activation, s)


def fuses_shared_activation(s: RankShapes) -> bool:
    return fuses_activation(shared_activation(s.model), s)


def fuses_dense_activation(s: RankShapes) -> bool:
    return fuses_activation(s.model.dense_activation, s)


def add_activation_backward(
    table: TensorTable,
    rows: ShapeFunction,
    inner: ShapeFunction,
    parts: ShapeFunction,
    fuses: ShapeCondition,
) -> None:
    """Add the tensors of an activation's backward. Composed in fp32: the incoming gradient, an intermediate one, the
    pre-activation, and the results before and behind rounding. Fused: the incoming gradient and the results."""

    def composed(s: RankShapes) -> bool:
        return not fuses(s)

    def composed_width(s: RankShapes) -> float:
        tensors = 2 + 3 * parts(s)
        return tensors * inner(s)

    def fused_width(s: RankShapes) -> float:
        tensors = 1 + parts(s)
        return tensors * inner(s)

    in_fp32 = table.only(composed)
    in_fp32.add("gradient of the activation, in fp32", rows, composed_width, "fp32")
    fused = table.only(fuses)
    fused.add("gradients of activation and pre-activation", rows, fused_width)


def expert_forward() -> WorkingSet:
    table = TensorTable().only(experts_outside_fp8)
    fused = table.only(fused_experts)
    fused.add("rows", padded_expert_rows, dispatched_token_width)
    fused.add("activated", expert_rows, expert_inner_width)
    table.add("results", expert_rows, dispatched_token_width)
    return table.entries


def expert_backward_end() -> WorkingSet:
    """Working set at the end of the experts' backward, with the gradients of rows and weights. The fused kernel frees
    the rows before it makes the gradient of rows."""
    table = backward_table().only(experts_outside_fp8)
    table.add("gradient of results", expert_rows, dispatched_token_width)
    unfused = table.only(unfused_experts)
    unfused.add("gradient of the pre-activation", expert_rows, expert_preactivation_width)
    table.add("gradient of rows, or rows", expert_rows, dispatched_token_width)
    table.add("gradient of arrived tokens", arrived_tokens, dispatched_token_width)
    wgrad = table.only(separate_expert_wgrad)
    wgrad.add("gradients of the experts' weights", expert_weight_rows, expert_weight_width)
    return table.entries


def expert_backward_start() -> WorkingSet:
    """Working set of the fused kernel's backward after it has recomputed the activation."""
    table = backward_table()
    fused = table.only(plain_fused_experts)
    fused.add("gradient of results", expert_rows, dispatched_token_width)
    fused.add("activation, recomputed", padded_expert_rows, expert_inner_width)
    wgrad = fused.only(separate_expert_wgrad)
    wgrad.add("gradient of down", expert_weight_rows, expert_inner_width)
    return table.entries


def expert_backward_activation() -> WorkingSet:
    table = backward_table()
    unfused = table.only(unfused_experts)
    widths = (expert_inner_width, expert_activation_parts)
    add_activation_backward(unfused, expert_rows, *widths, fuses_expert_activation)
    return table.entries


def attention_backward_table() -> TensorTable:
    table = backward_table()
    table.add("gradients of q k v and the result", context_tokens, attention_gradient_width)
    return table


def attend_backward_rope() -> WorkingSet:
    table = attention_backward_table()
    table.add("gradients of rotated q and k, in fp32", context_tokens, rotated_gradient_width, "fp32")
    return table.entries


def attend_backward_core() -> WorkingSet:
    table = attention_backward_table()
    scores = table.only(writes_score_gradients)
    scores.add("gradients of the scores", score_gradient_workspace, one_column, "byte")
    return table.entries


def attend_forward_ring() -> WorkingSet:
    table = TensorTable()
    add_ring_forward(table)
    return table.entries


def attend_backward_ring() -> WorkingSet:
    table = backward_table()
    add_ring_backward(table)
    return table.entries


def mlp_backward() -> WorkingSet:
    table = backward_table()
    widths = (dense_inner_width, dense_activation_parts)
    add_activation_backward(table, context_tokens, *widths, fuses_dense_activation)
    return table.entries


def shared_backward() -> WorkingSet:
    table = backward_table()
    widths = (shared_inner_width, shared_activation_parts)
    add_activation_backward(table, context_tokens, *widths, fuses_shared_activation)
    return table.entries


def attend_backward_products() -> list[WorkingSet]:
    return [
        fp8_product_backward("attention.query", context_tokens, query_width),
        fp8_product_backward("attention.out", context_tokens, stream_width),
    ]


def mlp_backward_products() -> list[WorkingSet]:
    return [fp8_product_backward(place, context_tokens, dense_preactivation_width) for place in DENSE_UP]


def shared_backward_products() -> list[WorkingSet]:
    return [fp8_product_backward(place, context_tokens, shared_preactivation_width) for place in SHARED_UP]


def predict_in_place() -> WorkingSet:
    table = TensorTable()
    in_place = table.only(overwrites_logits)
    in_place.add("logits of a chunk, then their gradient", logits_per_chunk, one_column)
    return table.entries


def predict_softmax() -> WorkingSet:
    table = TensorTable()
    apart = table.only(keeps_logits_apart)
    apart.add("logits of a chunk and their exponentials", logits_per_chunk, two_columns, "fp32")
    return table.entries


def predict_gradients() -> WorkingSet:
    table = TensorTable()
    apart = table.only(keeps_logits_apart)
    apart.add("gradient of a chunk's logits", logits_per_chunk, one_column)
    apart.add("the chunk's part of the head's gradient", vocab_shard_width, stream_width)
    return table.entries


def predict_backward() -> WorkingSet:
    table = TensorTable()
    table.add("gradient of the stream", rank_tokens, two_streams_width)
    table.add("gradient of the head", vocab_shard_width, stream_width)
    return table.entries


MOEFOLD_WORKING_SETS = {
    ("experts", "F"): [expert_forward(), *FP8_EXPERT_FORWARD],
    ("experts", "B"): [
        expert_backward_end(),
        expert_backward_start(),
        expert_backward_activation(),
        *FP8_EXPERT_BACKWARD,
    ],
    ("attend", "F"): [attend_forward_ring()],
    ("attend", "B"): [
        attend_backward_rope(),
        attend_backward_core(),
        attend_backward_ring(),
        *attend_backward_products(),
    ],
    ("mlp", "B"): [mlp_backward(), *mlp_backward_products()],
    ("shared", "B"): [shared_backward(), *shared_backward_products()],
    ("predict", "F"): [
        predict_in_place(),
        predict_softmax(),
        predict_gradients(),
    ],
    ("predict", "B"): [predict_backward()],
}

MOEFOLD_STACK = LayerStack(MOEFOLD_SAVED, MOEFOLD_WORKING_SETS, waiting_tensors())
