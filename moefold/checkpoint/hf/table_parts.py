"""Parts of name tables that several families share: what stands before a block's names is given, ours and theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable, TensorAlias
from moefold.config.run import ModelConfig

BlockPieces = Callable[[ModelConfig, int, str, str], Iterator[MappedPiece]]  # (model, layer, theirs, ours)


def build_name_table(model: ModelConfig, block: BlockPieces) -> NameTable:
    """Embedding, blocks, head, and layers that look further ahead, which lie behind the model's own."""
    whole = {"v": model.vocab, "d": model.hidden}
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    pieces = [MappedPiece(embedding, "embedding.weight", "v d -> v d", whole)]
    for layer in range(model.layers):
        pieces += block(model, layer, f"model.layers.{layer}.", f"blocks.{layer}.")
    pieces.append(MappedPiece("model.norm.weight", "head.norm.weight", "d -> d", whole))
    twins = [TensorAlias(head, embedding, written=False)] if model.tied_head else []
    if not model.tied_head:
        pieces.append(MappedPiece(head, "head.weight", "v d -> v d", whole))
    for depth in range(model.mtp):
        theirs, ours = f"model.layers.{model.layers + depth}.", f"ahead.{depth}."
        pieces += mtp_pieces(model, theirs, ours)
        pieces += block(model, model.layers + depth, theirs, ours + "block.")
        twins.append(TensorAlias(theirs + "embed_tokens.weight", embedding, written=True))
        twins.append(
            TensorAlias(theirs + "shared_head.head.weight", embedding if model.tied_head else head, written=True)
        )
    return NameTable(tuple(pieces), tuple(twins))


def mtp_pieces(model: ModelConfig, theirs: str, ours: str) -> Iterator[MappedPiece]:
    """How a further token is joined to the stream. Theirs has the token's half of the matrix first."""
    d = {"d": model.hidden, "i": 2 * model.hidden}
    yield MappedPiece(theirs + "enorm.weight", ours + "token_norm.weight", "d -> d", d)
    yield MappedPiece(theirs + "hnorm.weight", ours + "stream_norm.weight", "d -> d", d)
    for half, place in ((0, model.hidden), (model.hidden, 0)):
        cut = {"i": (half, model.hidden)}
        yield MappedPiece(theirs + "eh_proj.weight", ours + "join.weight", "d i -> d i", d, cut, (0, place))
    yield MappedPiece(theirs + "shared_head.norm.weight", ours + "norm.weight", "d -> d", d)


def norm_pieces(model: ModelConfig, layer: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    d = {"d": model.hidden}
    second = "moe" if is_moe_layer(model, layer) else "dense"
    yield MappedPiece(theirs + "input_layernorm.weight", ours + "attention.norm.weight", "d -> d", d)
    yield MappedPiece(theirs + "post_attention_layernorm.weight", f"{ours}{second}.norm.weight", "d -> d", d)


def grouped_attention_pieces(model: ModelConfig, theirs: str, ours: str) -> Iterator[MappedPiece]:
    a = model.attention
    theirs, ours = theirs + "self_attn.", ours + "attention."
    for short, name, heads in (("q", "query", a.heads), ("k", "key", a.kv_heads), ("v", "value", a.kv_heads)):
        sizes = {"h": heads, "x": a.head_dim, "d": model.hidden, "n": heads * a.head_dim}
        yield MappedPiece(f"{theirs}{short}_proj.weight", f"{ours}{name}.weight", "(h x) d -> h x d", sizes)
        if a.qkv_bias:
            yield MappedPiece(f"{theirs}{short}_proj.bias", f"{ours}{name}.bias", "(h x) -> h x", sizes)
        if a.qk_norm != "none" and short != "v":
            width = "x -> x" if a.qk_norm == "head" else "n -> n"
            yield MappedPiece(f"{theirs}{short}_norm.weight", f"{ours}{name}_norm.weight", width, sizes)
    yield from attention_out_pieces(model, theirs, ours, a.heads * a.head_dim)


def attention_out_pieces(model: ModelConfig, theirs: str, ours: str, width: int) -> Iterator[MappedPiece]:
    sizes = {"d": model.hidden, "n": width}
    yield MappedPiece(theirs + "o_proj.weight", ours + "out.weight", "d n -> d n", sizes)
    if model.attention.out_bias:
        yield MappedPiece(theirs + "o_proj.bias", ours + "out.bias", "d -> d", sizes)


def latent_attention_pieces(model: ModelConfig, theirs: str, ours: str) -> Iterator[MappedPiece]:
    """DeepSeek's: still and turning dims of a query, and the latent and the turning key, are one tensor each; so are
    keys and values. What turns lies in pairs on their side and in halves on ours."""
    a, d = model.attention, model.hidden
    theirs, ours = theirs + "self_attn.", ours + "attention."
    still, value = a.head_dim - a.rope_dim, a.value_dim or a.head_dim
    query = "q_proj"
    if a.q_rank:
        query, down = "q_b_proj", {"r": a.q_rank, "d": d}
        yield MappedPiece(theirs + "q_a_proj.weight", ours + "query_down.weight", "r d -> r d", down)
        if a.qkv_bias:
            yield MappedPiece(theirs + "q_a_proj.bias", ours + "query_down.bias", "r -> r", down)
        yield MappedPiece(theirs + "q_a_layernorm.weight", ours + "query_norm.weight", "r -> r", down)
    sizes = {"h": a.heads, "x": a.head_dim, "r": a.q_rank or d}
    for cut, halves in (((0, still), ""), ((still, a.rope_dim), "x")):
        names = (f"{theirs}{query}.weight", ours + "query.weight")
        yield MappedPiece(*names, "(h x) r -> h x r", sizes, {"x": cut}, (0, cut[0], 0), halves)
    joint = {"r": a.kv_rank + a.rope_dim, "d": d}
    for name, cut, halves in (("latent", (0, a.kv_rank), ""), ("turning", (a.kv_rank, a.rope_dim), "r")):
        down = theirs + "kv_a_proj_with_mqa."
        yield MappedPiece(f"{down}weight", f"{ours}{name}.weight", "r d -> r d", joint, {"r": cut}, halves=halves)
        if a.qkv_bias:
            yield MappedPiece(f"{down}bias", f"{ours}{name}.bias", "r -> r", joint, {"r": cut}, halves=halves)
    yield MappedPiece(theirs + "kv_a_layernorm.weight", ours + "latent_norm.weight", "r -> r", {"r": a.kv_rank})
    both = {"h": a.heads, "x": still + value, "r": a.kv_rank}
    for name, cut in (("key", (0, still)), ("value", (still, value))):
        up = theirs + "kv_b_proj.weight"
        yield MappedPiece(up, f"{ours}{name}.weight", "(h x) r -> h x r", both, {"x": cut})
    yield from attention_out_pieces(model, theirs, ours, a.heads * value)


def gated_mlp_pieces(model: ModelConfig, ffn: int, theirs: str, ours: str) -> Iterator[MappedPiece]:
    sizes = {"f": ffn, "d": model.hidden}
    for side, name in enumerate(("gate", "up")):
        names = (f"{theirs}{name}_proj.weight", f"{ours}gate_up.weight")
        yield MappedPiece(*names, "f d -> 1 f d", sizes, at=(side, 0, 0))
    yield MappedPiece(f"{theirs}down_proj.weight", f"{ours}down.weight", "d f -> d f", sizes)


def router_pieces(
    model: ModelConfig, theirs: str, ours: str, name: str = "gate", correction: bool = False
) -> Iterator[MappedPiece]:
    sizes = {"e": model.moe.experts, "d": model.hidden}
    yield MappedPiece(f"{theirs}{name}.weight", ours + "router.weight", "e d -> e d", sizes)
    if model.moe.biases:
        yield MappedPiece(f"{theirs}{name}.bias", ours + "router.bias", "e -> e", sizes)
    if correction:
        yield MappedPiece(f"{theirs}{name}.e_score_correction_bias", ours + "router.load.bias_E", "e -> e", sizes)


def expert_pieces(
    model: ModelConfig,
    theirs: str,
    ours: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[MappedPiece]:
    """Each expert's three matrices by themselves."""
    sizes = {"f": model.moe.ffn, "d": model.hidden}
    for e in range(model.moe.experts):
        for side, name in enumerate(names[:2]):
            one = f"{theirs}experts.{e}.{name}.weight"
            yield MappedPiece(one, ours + "experts.gate_up", "f d -> 1 1 f d", sizes, at=(e, side, 0, 0))
        one = f"{theirs}experts.{e}.{names[2]}.weight"
        yield MappedPiece(one, ours + "experts.down", "d f -> 1 d f", sizes, at=(e, 0, 0))
