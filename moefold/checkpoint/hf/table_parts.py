"""Parts of name tables that several families share. `theirs` and `ours` are the prefixes of a block's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable, PlaceholderTensor, TensorAlias
from moefold.config.run import ModelConfig

Pieces = Iterator[MappedPiece]
BlockPieces = Callable[[ModelConfig, int, str, str], Pieces]  # (model, layer, theirs, ours)
Row = tuple[str, str, str]  # their name, our name, pattern

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def whole_tensors(theirs: str, ours: str, sizes: Mapping[str, int], *rows: Row) -> Pieces:
    """Pieces that are whole tensors on both sides."""
    for their_name, our_name, pattern in rows:
        their_tensor = theirs + their_name
        our_tensor = ours + our_name
        yield MappedPiece(their_tensor, our_tensor, pattern, sizes)


def build_name_table(model: ModelConfig, block_pieces: BlockPieces) -> NameTable:
    """Embedding, blocks, head, and MTP layers, which are numbered behind the model's own layers."""
    sizes = {"v": model.vocab, "d": model.hidden}
    pieces = [MappedPiece(EMBEDDING, "embedding.weight", "v d -> v d", sizes)]
    for layer in range(model.layers):
        pieces += block_pieces(model, layer, f"model.layers.{layer}.", f"blocks.{layer}.")
    pieces.append(MappedPiece("model.norm.weight", "head.norm.weight", "d -> d", sizes))
    aliases: list[TensorAlias] = []
    head = HEAD
    if model.tied_head:
        head = EMBEDDING
        aliases.append(TensorAlias(HEAD, EMBEDDING, written=False))
    else:
        pieces.append(MappedPiece(HEAD, "head.weight", "v d -> v d", sizes))
    for depth in range(model.mtp):
        layer = model.layers + depth
        theirs = f"model.layers.{layer}."
        ours = f"ahead.{depth}."
        pieces += mtp_pieces(model, theirs, ours)
        pieces += block_pieces(model, layer, theirs, ours + "block.")
        # Their MTP layers have copies of the embedding and of the head.
        embedding_copy = theirs + "embed_tokens.weight"
        aliases.append(TensorAlias(embedding_copy, EMBEDDING, written=True))
        head_copy = theirs + "shared_head.head.weight"
        aliases.append(TensorAlias(head_copy, head, written=True))
    return NameTable(tuple(pieces), tuple(aliases))


def empty_mlp_shapes(model: ModelConfig, prefix: str) -> dict[str, tuple[int, int]]:
    """The tensors of an MLP of width 0, as their models have it where ours have none."""
    d = model.hidden
    return {
        prefix + "gate_proj.weight": (0, d),
        prefix + "up_proj.weight": (0, d),
        prefix + "down_proj.weight": (d, 0),
    }


def with_placeholders(table: NameTable, model: ModelConfig, shapes: Mapping[str, tuple[int, int]]) -> NameTable:
    """The table with tensors without effect in every layer with experts."""
    placeholders: list[PlaceholderTensor] = []
    for layer in range(model.layers + model.mtp):
        if not is_moe_layer(model, layer):
            continue
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            placeholder = PlaceholderTensor(prefix + name, shape)
            placeholders.append(placeholder)
    return replace(table, placeholders=tuple(placeholders))


def mtp_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """The norms and the projection that join the next token to the stream."""
    d = model.hidden
    sizes = {"d": d, "i": 2 * d}
    yield from whole_tensors(
        theirs,
        ours,
        sizes,
        ("enorm.weight", "token_norm.weight", "d -> d"),
        ("hnorm.weight", "stream_norm.weight", "d -> d"),
    )
    # Theirs has the token's half of the projection first, ours the stream's.
    token_half = {"i": (0, d)}
    stream_half = {"i": (d, d)}
    projection = (theirs + "eh_proj.weight", ours + "join.weight", "d i -> d i", sizes)
    yield MappedPiece(*projection, token_half, corner=(0, d))
    yield MappedPiece(*projection, stream_half, corner=(0, 0))
    yield MappedPiece(theirs + "shared_head.norm.weight", ours + "norm.weight", "d -> d", sizes)


def norm_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Pieces:
    second = "moe" if is_moe_layer(model, layer) else "dense"
    yield from whole_tensors(
        theirs,
        ours,
        {"d": model.hidden},
        ("input_layernorm.weight", "attention.norm.weight", "d -> d"),
        ("post_attention_layernorm.weight", f"{second}.norm.weight", "d -> d"),
    )


def grouped_attention_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    a = model.attention
    theirs += "self_attn."
    ours += "attention."
    has_norm = a.qk_norm != "none"
    heads = a.heads
    kv_heads = a.kv_heads
    yield from head_projection_pieces(model, theirs + "q", ours + "query", heads, has_norm)
    yield from head_projection_pieces(model, theirs + "k", ours + "key", kv_heads, has_norm)
    yield from head_projection_pieces(model, theirs + "v", ours + "value", kv_heads, has_norm=False)
    width = heads * a.head_dim
    yield from attention_out_pieces(model, theirs, ours, width)


def head_projection_pieces(model: ModelConfig, theirs: str, ours: str, heads: int, has_norm: bool) -> Pieces:
    """Weight, bias and norm of the query, key or value projection."""
    a = model.attention
    head = a.head_dim
    sizes = {
        "h": heads,
        "x": head,
        "d": model.hidden,
        "n": heads * head,
    }
    rows = [("_proj.weight", ".weight", "(h x) d -> h x d")]
    if a.qkv_bias:
        rows.append(("_proj.bias", ".bias", "(h x) -> h x"))
    if has_norm:
        pattern = "x -> x" if a.qk_norm == "head" else "n -> n"
        rows.append(("_norm.weight", "_norm.weight", pattern))
    yield from whole_tensors(theirs, ours, sizes, *rows)


def attention_out_pieces(model: ModelConfig, theirs: str, ours: str, width: int) -> Pieces:
    sizes = {"d": model.hidden, "n": width}
    rows = [("o_proj.weight", "out.weight", "d n -> d n")]
    if model.attention.out_bias:
        rows.append(("o_proj.bias", "out.bias", "d -> d"))
    yield from whole_tensors(theirs, ours, sizes, *rows)


def latent_attention_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """DeepSeek's MLA. One tensor of theirs holds the nope and rope dims of a query, one the kv latent and the rope key,
    one keys and values. Rope dims are in adjacent pairs on their side and in halves on ours."""
    a = model.attention
    theirs += "self_attn."
    ours += "attention."
    value_dim = a.value_dim or a.head_dim
    yield from latent_query_pieces(model, theirs, ours)
    yield from latent_down_pieces(model, theirs, ours)
    yield from latent_up_pieces(model, theirs, ours, value_dim)
    yield from attention_out_pieces(model, theirs, ours, a.heads * value_dim)


def latent_query_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    a = model.attention
    their_query = "q_proj.weight"
    rank = model.hidden
    if a.q_rank:
        # Queries come from a latent, by a down and an up projection.
        their_query = "q_b_proj.weight"
        rank = a.q_rank
        rows = [("q_a_proj.weight", "query_down.weight", "r d -> r d")]
        if a.qkv_bias:
            rows.append(("q_a_proj.bias", "query_down.bias", "r -> r"))
        rows.append(("q_a_layernorm.weight", "query_norm.weight", "r -> r"))
        sizes = {"r": rank, "d": model.hidden}
        yield from whole_tensors(theirs, ours, sizes, *rows)
    nope = a.head_dim - a.rope_dim
    sizes = {"h": a.heads, "x": a.head_dim, "r": rank}
    query = (theirs + their_query, ours + "query.weight", "(h x) r -> h x r", sizes)
    nope_dims = {"x": (0, nope)}
    rope_dims = {"x": (nope, a.rope_dim)}
    rope_corner = (0, nope, 0)
    yield MappedPiece(*query, nope_dims)
    yield MappedPiece(*query, rope_dims, rope_corner, deinterleave="x")


def latent_down_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """The down projection to the kv latent and to the rope key that all heads share."""
    a = model.attention
    width = a.kv_rank + a.rope_dim
    sizes = {"r": width, "d": model.hidden}
    down = theirs + "kv_a_proj_with_mqa."
    rows = [("weight", "r d -> r d")]
    if a.qkv_bias:
        rows.append(("bias", "r -> r"))
    latent = {"r": (0, a.kv_rank)}
    rope_key = {"r": (a.kv_rank, a.rope_dim)}
    for name, pattern in rows:
        our_name = f"{ours}latent.{name}"
        yield MappedPiece(down + name, our_name, pattern, sizes, latent)
    for name, pattern in rows:
        our_name = f"{ours}turning.{name}"
        yield MappedPiece(down + name, our_name, pattern, sizes, rope_key, deinterleave="r")
    their_norm = theirs + "kv_a_layernorm.weight"
    our_norm = ours + "latent_norm.weight"
    norm_sizes = {"r": a.kv_rank}
    yield MappedPiece(their_norm, our_norm, "r -> r", norm_sizes)


def latent_up_pieces(model: ModelConfig, theirs: str, ours: str, value_dim: int) -> Pieces:
    """The up projection from the kv latent to keys and values."""
    a = model.attention
    nope = a.head_dim - a.rope_dim
    width = nope + value_dim
    sizes = {"h": a.heads, "x": width, "r": a.kv_rank}
    up = theirs + "kv_b_proj.weight"
    pattern = "(h x) r -> h x r"
    key_dims = {"x": (0, nope)}
    value_dims = {"x": (nope, value_dim)}
    yield MappedPiece(up, ours + "key.weight", pattern, sizes, key_dims)
    yield MappedPiece(up, ours + "value.weight", pattern, sizes, value_dims)


def gated_mlp_pieces(model: ModelConfig, ffn: int, theirs: str, ours: str) -> Pieces:
    sizes = {"f": ffn, "d": model.hidden}
    gate = theirs + "gate_proj.weight"
    up = theirs + "up_proj.weight"
    down = theirs + "down_proj.weight"
    gate_up = ours + "gate_up.weight"  # gate and up stacked in one tensor
    pattern = "f d -> 1 f d"
    gate_corner = (0, 0, 0)
    up_corner = (1, 0, 0)
    yield MappedPiece(gate, gate_up, pattern, sizes, corner=gate_corner)
    yield MappedPiece(up, gate_up, pattern, sizes, corner=up_corner)
    yield MappedPiece(down, ours + "down.weight", "d f -> d f", sizes)


def router_pieces(model: ModelConfig, theirs: str, ours: str, name: str = "gate", correction: bool = False) -> Pieces:
    """The router, and with `correction` the selection bias."""
    experts = model.moe.experts
    sizes = {"e": experts, "d": model.hidden}
    rows = [(".weight", ".weight", "e d -> e d")]
    if model.moe.biases:
        rows.append((".bias", ".bias", "e -> e"))
    if correction:
        rows.append((".e_score_correction_bias", ".load.bias_E", "e -> e"))
    yield from whole_tensors(theirs + name, ours + "router", sizes, *rows)


def expert_pieces(
    model: ModelConfig,
    theirs: str,
    ours: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Pieces:
    """The three matrices of each expert, which are separate tensors on their side."""
    ffn = model.moe.ffn
    sizes = {"f": ffn, "d": model.hidden}
    gate_up = ours + "experts.gate_up"
    down = ours + "experts.down"
    for e in range(model.moe.experts):
        expert = f"{theirs}experts.{e}."
        gate_name, up_name, down_name = (f"{expert}{name}.weight" for name in names)
        gate_corner = (e, 0, 0, 0)
        up_corner = (e, 1, 0, 0)
        down_corner = (e, 0, 0)
        yield MappedPiece(gate_name, gate_up, "f d -> 1 1 f d", sizes, corner=gate_corner)
        yield MappedPiece(up_name, gate_up, "f d -> 1 1 f d", sizes, corner=up_corner)
        yield MappedPiece(down_name, down, "d f -> 1 d f", sizes, corner=down_corner)
