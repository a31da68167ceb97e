"""Multi-token prediction: each layer looks one token further ahead than the one before, with the model's own embedding
and head. At position i it joins what is known there with token i + depth, and predicts the one behind that.

    depth 0 (the model)   h_i = norm(x_i)             -> token i + 1
    depth 1               join(h_i, token i + 1)      -> token i + 2       one block, causal in i, and a norm of its own
    depth 2               join(its h_i, token i + 2)  -> token i + 3

T tokens of this rank, D width, B sequences of S. A label is the token one place on, IGNORED where there is none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.config.run import ModelConfig
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.block import make_transformer_block
from moefold.model.norm import AddNorm, RMSNorm
from moefold.model.parts import ModelParts
from moefold.precision.linear import Linear


class MtpLayer(nn.Module):
    def __init__(self, model: ModelConfig, depth: int, parts: ModelParts):
        super().__init__()
        d = model.hidden
        eps = model.norm_eps
        self.depth = depth
        self.stream_norm = RMSNorm(d, eps, parts)
        self.token_norm = RMSNorm(d, eps, parts)
        inputs = 2 * d
        std = model.init_std
        world = parts.world
        self.join = Linear(world, inputs, d, std=std)
        layer = model.layers + depth - 1
        self.block = make_transformer_block(model, layer, parts)
        self.norm = AddNorm(model, parts)

    def forward(self, h_TD: Tensor, token_TD: Tensor) -> Tensor:
        """What is known at a position and the token it looks past, joined."""
        known_TD = self.stream_norm(h_TD)
        next_TD = self.token_norm(token_TD)
        both = (known_TD, next_TD)
        joined_TD = torch.cat(both, dim=-1)
        return self.join(joined_TD)


def tokens_shifted_by(tokens_BS: Tensor, depth: int, begins_BS: Tensor | None = None) -> Tensor:
    """The token `depth` places on; behind the end of the sequence or document, where no label follows, token 0."""
    return shifted_within(tokens_BS, depth, begins_BS, 0)


def labels_shifted_by(labels_BS: Tensor, depth: int, begins_BS: Tensor | None = None) -> Tensor:
    """The label `depth` places on, IGNORED where it is missing or belongs to another document. Labels before it may be
    missing: the answer's second token is predicted from the question, though the question has no loss."""
    return shifted_within(labels_BS, depth, begins_BS, IGNORE_INDEX)


def shifted_within(x_BS: Tensor, depth: int, begins_BS: Tensor | None, behind: int) -> Tensor:
    """What is `depth` places on, and `behind` where the sequence or document ends before."""
    later_BS = x_BS[:, depth:]
    missing = min(depth, x_BS.shape[1])  # a row of padding may be shorter
    at_end = (0, missing)
    shifted_BS = F.pad(later_BS, at_end, value=behind)
    if begins_BS is None:
        return shifted_BS
    later_begins_BS = begins_BS[:, depth:]
    shifted_begins_BS = F.pad(later_begins_BS, at_end, value=-1)
    is_other_BS = shifted_begins_BS != begins_BS
    return shifted_BS.masked_fill(is_other_BS, behind)
