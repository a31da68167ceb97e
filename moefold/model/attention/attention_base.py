"""What every kind of attention has: norm, projections, rotation, the reach of a layer, the scale of scores, sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.step_specs import sliding_window_of
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig, RopeConfig
from moefold.kernels.attention.cached_attention import cached_attention
from moefold.kernels.bound import BoundKernels
from moefold.kernels.norm.rope import RopeAngles, rope
from moefold.layout.declare import DeclaringModule
from moefold.layout.past_keys import PastKeys, Positions
from moefold.layout.placement import sharded_over_tp
from moefold.model.attention.context_parallel import Attend, JoinHeads, share_of_heads
from moefold.model.attention.logit_watch import LogitWatch
from moefold.model.attention.rope_tables import rotary_tables, softmax_scale
from moefold.model.initialise import output_std
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import AnyFunction, Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Linear, LinearGroup, TpProjections


class HeadVectors(NamedTuple):
    """Queries, keys and values of this rank's heads."""

    q: Tensor
    k: Tensor
    v: Tensor


class HeadsOverTp:
    """Heads are cut over tp alone: each rank has its heads at the positions of its cp rank."""

    def __init__(self, tp_projections: TpProjections):
        self.tp_projections = tp_projections

    def to_heads(
        self, h_TD: Tensor, layers: LinearGroup, around: AnyFunction, shard: TokenShard
    ) -> tuple[list[Tensor], TokenShard]:
        projected = self.tp_projections.gather(h_TD, layers, around)
        by_sequence = (shard.sequences, -1)
        return [x_CHD.unflatten(0, by_sequence) for x_CHD in projected], shard

    def from_heads(self, y_BSN: Tensor, layer: Linear, around: AnyFunction, shard: TokenShard) -> Tensor:
        y_CN = y_BSN.flatten(0, 1)
        return self.tp_projections.scatter(y_CN, layer, around)


class AttentionBase(DeclaringModule):
    out: Linear

    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(parts.world)
        a = model.attention
        tp = self.world.axis("tp")
        self.tp = tp
        self.head_projections = parts.heads_in_exchanges or HeadsOverTp(parts.tp_projections)
        self.layer = layer
        width = a.head_dim
        self.scale = softmax_scale(width, a.rope)
        self.window = sliding_window_of(model, layer)
        self.sinks = None
        if a.sinks:
            heads = a.heads
            by_head = sharded_over_tp(0)
            self.sinks = self.declare_parameter("sinks", heads, placement=by_head, std=0.0)
        self.norm = AddNorm(model, parts)
        self.std = model.init_std
        self.out_std = output_std(model)
        self.logit_watch: LogitWatch | None = None  # set where logits are clipped (optim/qk_clip.py)
        self.core = Region("core")
        self.swap = Region("swap")
        self.attend_over: dict[int, Callable[..., Tensor]] = {}  # by the ranks that share a sequence
        for ranks, mechanism in parts.contexts.items():
            join_heads = mechanism.heads_joiner(self.swap)
            self.attend_over[ranks] = partial(attend_and_join, mechanism.attend, join_heads)
        self.out_region = Region("out")
        self.cached_attention = parts.kernels[cached_attention]

    def make_linear(self, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """A projection that every tp rank holds whole."""
        world = self.world
        std = self.std
        return Linear(world, inputs, outputs, bias=bias, std=std)

    def make_head_linear(self, inputs: int, heads: int, width: int, bias: bool = False) -> Linear:
        """A projection to heads, which tp cuts."""
        by_head = sharded_over_tp(0)
        outputs = (heads, width)
        world = self.world
        std = self.std
        return Linear(world, inputs, *outputs, bias=bias, std=std, placement=by_head, rows="heads")

    def make_whole_head_linear(self, inputs: int, heads: int, width: int, bias: bool = False) -> Linear:
        """A projection to heads that every tp rank holds whole."""
        world = self.world
        std = self.std
        return Linear(world, inputs, heads, width, bias=bias, std=std, rows="heads")

    def make_out_linear(self, inputs: int, outputs: int, bias: bool) -> Linear:
        """The projection of all heads back to the stream: each tp rank computes a summand."""
        by_input = sharded_over_tp(1)
        world = self.world
        std = self.out_std
        return Linear(world, inputs, outputs, bias=bias, std=std, placement=by_input)

    def attend(self, heads: HeadVectors, shard: TokenShard) -> Tensor:
        """(T, D): what the context mechanism gives for each token, its heads joined and projected back. `shard`: of the
        positions that the heads are of."""
        q, k, v = heads
        scale = self.scale
        window = self.window
        begins_BS = shard.begins_BS
        sinks = self.sinks
        watch = self.logit_watch if self.training else None
        among = shard.head_axis
        if among.size > 1:
            sinks = None if sinks is None else share_of_heads(sinks, among)
            watch = watch and watch.share(among.index, among.size)
        ranks = shard.cp.size
        attend = self.attend_over[ranks]
        if watch is not None:
            q = without_padding(q, shard)
            if ranks == 1:
                watch.note(q, k, scale, window, begins_BS)
            else:
                attend = partial(attend, watch=watch)  # to note logits where queries meet the keys of other ranks
        y_BSN = self.core(attend, q, k, v, scale, window, sinks, begins_BS)
        return self.head_projections.from_heads(y_BSN, self.out, self.out_region, shard)

    def keep_prompt(self, shard: TokenShard, *made: Tensor) -> None:
        """Where text is generated, keep what this layer made of the prompts' positions."""
        if shard.past is not None:
            shard.past.keep_prompt(self.layer, made, self.window)

    def attend_to_past(self, q_BHD: Tensor, made: Sequence[Tensor], width: int, past: PastKeys) -> Tensor:
        """(B, H, V): attention of one new position to those that are kept. `made`: key and value of the new position,
        or a key alone, whose first columns are the value. `width`: that of a value."""
        sequences, heads, _ = q_BHD.shape
        y_BHV = q_BHD.new_empty(sequences, heads, width)
        k, v = key_and_value(made)
        keys, values = key_and_value(past.rooms(self.layer))
        inputs = (q_BHD, k, v, keys, values)
        attend = self.cached_attention
        attend(y_BHV, *inputs, past.position, past.begin_B, self.scale, self.sinks)
        return y_BHV

    def project_out(self, y_BHV: Tensor, shard: TokenShard) -> Tensor:
        """(B, D): heads of one position joined and projected back to the stream."""
        y_B1HV = y_BHV.unsqueeze(1)
        y_B1N = y_B1HV.flatten(2)
        return self.head_projections.from_heads(y_B1N, self.out, self.out_region, shard)

    def clip_factors(self, ratio_H: Tensor) -> dict[str, Tensor]:
        """Factors of the rows (heads, width) of projections, by parameter, that multiply the logits of each head by its
        ratio; a ratio of one leaves the rows as they are."""
        kind = type(self).__name__
        raise UserError(
            f"optim.qk_clip: {kind} does not say which rows to rescale (clip_factors); set optim.qk_clip to 0"
        )

    def forward(self, h_TD: Tensor, shard: TokenShard) -> Tensor:
        """Attention over normed tokens; the residual connection is the block's."""
        raise NotImplementedError


def without_padding(q_BSHD: Tensor, shard: TokenShard) -> Tensor:
    """Queries of which those of padding are zero, and so their logits, which are then above no threshold. Nothing that
    is trained reads what padding attends to."""
    if not shard.is_packed:
        return q_BSHD
    padding_BS = shard.padding_BS
    held_BS = shard.positions_held(padding_BS)
    is_padding = held_BS[:, :, None, None]
    return q_BSHD.masked_fill(is_padding, 0)


def key_and_value(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Two tensors, or one key that holds its value."""
    key, *rest = tensors
    return key, rest[0] if rest else None


def attend_and_join(attend: Attend, join_heads: JoinHeads, *inputs: Any, **noted: Any) -> Tensor:
    """(B, S, N): the results of this rank's positions, their heads joined."""
    y_BShV = attend(*inputs, **noted)
    return join_heads(y_BShV)


@lru_cache(maxsize=16)
def rope_angles(length: int, dims: int, config: RopeConfig, dtype: torch.dtype, device: torch.device) -> RopeAngles:
    """The tables of all positions on a device, in fp32 or better. All layers of a model share them."""
    with torch.inference_mode(False):  # tables made while generating are used in training too
        cos_Sd, sin_Sd = rotary_tables(length, dims, config)
        cos_Sd = cos_Sd.to(device, dtype)
        sin_Sd = sin_Sd.to(device, dtype)
        return RopeAngles(cos_Sd, sin_Sd)


def angles_at(tables: RopeAngles, held: Positions) -> RopeAngles:
    cos = tables.cos_Sd[held]
    sin = tables.sin_Sd[held]
    return RopeAngles(cos, sin)


def angles_at_past(tables: RopeAngles, past: PastKeys, length: int, begins_BS: Tensor | None) -> RopeAngles:
    held = past.positions(length, begins_BS)
    return angles_at(tables, held)


class Rotary:
    """Rotates the first or the last `dims` of a head; the other dims stay as they are."""

    def __init__(self, dims: int, config: RopeConfig, seq_len: int, kernels: BoundKernels):
        self.dims = dims
        self.config = config
        self.seq_len = seq_len
        parameters = torch.get_default_dtype()
        self.dtype = torch.promote_types(parameters, torch.float32)
        self.rope = kernels[rope]
        self.begins_anew = kernels.facts.invariant  # with each document, so that bits do not depend on its place

    def angles(self, shard: TokenShard) -> RopeAngles:
        """The tables at the positions that this rank holds."""
        device = shard.device
        length = shard.length
        dtype = self.dtype
        tables = rope_angles(self.seq_len, self.dims, self.config, dtype, device)
        held = slice(length)
        if shard.cp.size > 1:
            held = shard.local_positions
        begins_BS = shard.begins_BS
        past = shard.past
        if past is not None:
            find_angles = partial(angles_at_past, tables, past, length, begins_BS)
            return past.once((self.dims, self.config), find_angles)
        if self.begins_anew and begins_BS is not None:
            position_S = torch.arange(length, device=device)
            held = position_S - begins_BS
        return angles_at(tables, held)

    def first(self, x_BSHD: Tensor, shard: TokenShard) -> Tensor:
        angles = self.angles(shard)
        dims = self.dims
        width = x_BSHD.shape[-1]
        if dims == width:
            return self.rope(x_BSHD, angles)
        rotating = x_BSHD[..., :dims]
        staying = x_BSHD[..., dims:]
        rotated = self.rope(rotating, angles)
        parts = (rotated, staying)
        return torch.cat(parts, dim=-1)

    def last(self, x_BSHD: Tensor, shard: TokenShard) -> Tensor:
        angles = self.angles(shard)
        dims = self.dims
        staying = x_BSHD[..., :-dims]
        rotating = x_BSHD[..., -dims:]
        rotated = self.rope(rotating, angles)
        parts = (staying, rotated)
        return torch.cat(parts, dim=-1)
