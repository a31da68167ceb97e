"""Parts of name tables that several families share. `theirs` and `ours` are the prefixes of a block's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable, TensorAlias
from moefold.config.run import ModelConfig

Pieces = Iterator[MappedPiece]
BlockPieces = Callable[[ModelConfig, int, str, str], Pieces]  # (model, layer, theirs, ours)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def build_name_table(model: ModelConfig, block_pieces: BlockPieces) -> NameTable:
    """Embedding, blocks, head, and MTP layers, which are numbered behind the model's own layers."""
    sizes = {"v": model.vocab, "d": model.hidden}
    pieces = [MappedPiece(EMBEDDING, "embedding.weight", "v d -> v d", sizes)]
    for layer in range(model.layers):
        pieces += block_pieces(model, layer, f"model.layers.{layer}.", f"blocks.{layer}.")
    pieces.append(MappedPiece("model.norm.weight", "head.norm.weight", "d -> d", sizes))
    aliases: list[TensorAlias] = []
    if model.tied_head:
        aliases.append(TensorAlias(HEAD, EMBEDDING, written=False))
    else:
        pieces.append(MappedPiece(HEAD, "head.weight", "v d -> v d", sizes))
    head = EMBEDDING if model.tied_head else HEAD
    for depth in range(model.mtp):
        layer = model.layers + depth
        theirs, ours = f"model.layers.{layer}.", f"ahead.{depth}."
        pieces += mtp_pieces(model, theirs, ours)
        pieces += block_pieces(model, layer, theirs, ours + "block.")
        # Their MTP layers have copies of the embedding and of the head.
        aliases.append(TensorAlias(theirs + "embed_tokens.weight", EMBEDDING, written=True))
        aliases.append(TensorAlias(theirs + "shared_head.head.weight", head, written=True))
    return NameTable(tuple(pieces), tuple(aliases))


def mtp_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """The norms and the projection that join the next token to the stream. Theirs has the token's half of the matrix
    first, ours the stream's."""
    d = model.hidden
    sizes = {"d": d, "i": 2 * d}
    yield MappedPiece(theirs + "enorm.weight", ours + "token_norm.weight", "d -> d", sizes)
    yield MappedPiece(theirs + "hnorm.weight", ours + "stream_norm.weight", "d -> d", sizes)
    projection = (theirs + "eh_proj.weight", ours + "join.weight", "d i -> d i")
    for their_start, our_start in ((0, d), (d, 0)):
        cut = {"i": (their_start, d)}
        yield MappedPiece(*projection, sizes, cut, corner=(0, our_start))
    yield MappedPiece(theirs + "shared_head.norm.weight", ours + "norm.weight", "d -> d", sizes)


def norm_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Pieces:
    sizes = {"d": model.hidden}
    second = "moe" if is_moe_layer(model, layer) else "dense"
    yield MappedPiece(theirs + "input_layernorm.weight", ours + "attention.norm.weight", "d -> d", sizes)
    yield MappedPiece(theirs + "post_attention_layernorm.weight", f"{ours}{second}.norm.weight", "d -> d", sizes)


def grouped_attention_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    a = model.attention
    theirs, ours = theirs + "self_attn.", ours + "attention."
    yield from head_projection_pieces(model, theirs + "q", ours + "query", a.heads)
    yield from head_projection_pieces(model, theirs + "k", ours + "key", a.kv_heads)
    yield from head_projection_pieces(model, theirs + "v", ours + "value", a.kv_heads, normed=False)
    yield from attention_out_pieces(model, theirs, ours, a.heads * a.head_dim)


def head_projection_pieces(model: ModelConfig, theirs: str, ours: str, heads: int, normed: bool = True) -> Pieces:
    """Weight, bias and norm of the query, key or value projection."""
    a = model.attention
    sizes = {"h": heads, "x": a.head_dim, "d": model.hidden, "n": heads * a.head_dim}
    yield MappedPiece(theirs + "_proj.weight", ours + ".weight", "(h x) d -> h x d", sizes)
    if a.qkv_bias:
        yield MappedPiece(theirs + "_proj.bias", ours + ".bias", "(h x) -> h x", sizes)
    if normed and a.qk_norm != "none":
        pattern = "x -> x" if a.qk_norm == "head" else "n -> n"
        yield MappedPiece(theirs + "_norm.weight", ours + "_norm.weight", pattern, sizes)


def attention_out_pieces(model: ModelConfig, theirs: str, ours: str, width: int) -> Pieces:
    sizes = {"d": model.hidden, "n": width}
    yield MappedPiece(theirs + "o_proj.weight", ours + "out.weight", "d n -> d n", sizes)
    if model.attention.out_bias:
        yield MappedPiece(theirs + "o_proj.bias", ours + "out.bias", "d -> d", sizes)


def latent_attention_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """DeepSeek's MLA. One tensor of theirs holds the nope and rope dims of a query, one the kv latent and the rope key,
    one keys and values. Rope dims are in adjacent pairs on their side and in halves on ours."""
    a = model.attention
    theirs, ours = theirs + "self_attn.", ours + "attention."
    yield from latent_query_pieces(model, theirs, ours)
    yield from latent_down_pieces(model, theirs, ours)
    yield from latent_up_pieces(model, theirs, ours)
    yield from attention_out_pieces(model, theirs, ours, a.heads * (a.value_dim or a.head_dim))


def latent_query_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    a, d = model.attention, model.hidden
    their_query = theirs + "q_proj.weight"
    if a.q_rank:
        their_query = theirs + "q_b_proj.weight"
        sizes = {"r": a.q_rank, "d": d}
        yield MappedPiece(theirs + "q_a_proj.weight", ours + "query_down.weight", "r d -> r d", sizes)
        if a.qkv_bias:
            yield MappedPiece(theirs + "q_a_proj.bias", ours + "query_down.bias", "r -> r", sizes)
        yield MappedPiece(theirs + "q_a_layernorm.weight", ours + "query_norm.weight", "r -> r", sizes)
    nope = a.head_dim - a.rope_dim
    sizes = {"h": a.heads, "x": a.head_dim, "r": a.q_rank or d}
    query = (their_query, ours + "query.weight", "(h x) r -> h x r", sizes)
    yield MappedPiece(*query, cut={"x": (0, nope)}, corner=(0, 0, 0))
    yield MappedPiece(*query, cut={"x": (nope, a.rope_dim)}, corner=(0, nope, 0), deinterleave="x")


def latent_down_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """The down projection to the kv latent and to the rope key that all heads share."""
    a = model.attention
    sizes = {"r": a.kv_rank + a.rope_dim, "d": model.hidden}
    down = theirs + "kv_a_proj_with_mqa."
    latent, rope_key = {"r": (0, a.kv_rank)}, {"r": (a.kv_rank, a.rope_dim)}
    for name, cut, pairs in (("latent", latent, ""), ("turning", rope_key, "r")):
        our_name = ours + name
        yield MappedPiece(down + "weight", our_name + ".weight", "r d -> r d", sizes, cut, deinterleave=pairs)
        if a.qkv_bias:
            yield MappedPiece(down + "bias", our_name + ".bias", "r -> r", sizes, cut, deinterleave=pairs)
    yield MappedPiece(theirs + "kv_a_layernorm.weight", ours + "latent_norm.weight", "r -> r", {"r": a.kv_rank})


def latent_up_pieces(model: ModelConfig, theirs: str, ours: str) -> Pieces:
    """The up projection from the kv latent to keys and values."""
    a = model.attention
    nope, value_dim = a.head_dim - a.rope_dim, a.value_dim or a.head_dim
    sizes = {"h": a.heads, "x": nope + value_dim, "r": a.kv_rank}
    up = theirs + "kv_b_proj.weight"
    keys, values = {"x": (0, nope)}, {"x": (nope, value_dim)}
    yield MappedPiece(up, ours + "key.weight", "(h x) r -> h x r", sizes, keys)
    yield MappedPiece(up, ours + "value.weight", "(h x) r -> h x r", sizes, values)


def gated_mlp_pieces(model: ModelConfig, ffn: int, theirs: str, ours: str) -> Pieces:
    sizes = {"f": ffn, "d": model.hidden}
    for side, name in enumerate(("gate", "up")):
        their_name = f"{theirs}{name}_proj.weight"
        yield MappedPiece(their_name, ours + "gate_up.weight", "f d -> 1 f d", sizes, corner=(side, 0, 0))
    yield MappedPiece(theirs + "down_proj.weight", ours + "down.weight", "d f -> d f", sizes)


def router_pieces(model: ModelConfig, theirs: str, ours: str, name: str = "gate", correction: bool = False) -> Pieces:
    """The router, and with `correction` the selection bias."""
    sizes = {"e": model.moe.experts, "d": model.hidden}
    theirs += name
    yield MappedPiece(theirs + ".weight", ours + "router.weight", "e d -> e d", sizes)
    if model.moe.biases:
        yield MappedPiece(theirs + ".bias", ours + "router.bias", "e -> e", sizes)
    if correction:
        yield MappedPiece(theirs + ".e_score_correction_bias", ours + "router.load.bias_E", "e -> e", sizes)


def expert_pieces(
    model: ModelConfig,
    theirs: str,
    ours: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Pieces:
    """The three matrices of each expert, which are separate tensors on their side."""
    sizes = {"f": model.moe.ffn, "d": model.hidden}
    gate_up, down = ours + "experts.gate_up", ours + "experts.down"
    for e in range(model.moe.experts):
        gate_name, up_name, down_name = (f"{theirs}experts.{e}.{name}.weight" for name in names)
        yield MappedPiece(gate_name, gate_up, "f d -> 1 1 f d", sizes, corner=(e, 0, 0, 0))
        yield MappedPiece(up_name, gate_up, "f d -> 1 1 f d", sizes, corner=(e, 1, 0, 0))
        yield MappedPiece(down_name, down, "d f -> 1 d f", sizes, corner=(e, 0, 0))
