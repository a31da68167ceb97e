"""Norms, rotary positions and the loss of transformers' models by moefold's ops, in place of their own functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.kernels.norm.rmsnorm import rmsnorm
from moefold.kernels.norm.rope import RopeAngles, rope
from moefold.kernels.vocabulary.cross_entropy import cross_entropy
from moefold.layout.labels import IGNORE_INDEX
from moefold.transformers.kernels import kernel_for, kernels_for


def normalise(module: Any, hidden_states: Tensor) -> Tensor:
    """In place of the forward method of an RMSNorm."""
    weight = module.weight
    norm = kernel_for(hidden_states, rmsnorm)
    return norm(hidden_states, weight.to(hidden_states.dtype), module.variance_epsilon)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """In place of `apply_rotary_pos_emb`. The second half of `cos` and `sin` repeats the first."""
    wide = torch.promote_types(cos.dtype, torch.float32)
    half = cos.shape[-1] // 2
    angles = RopeAngles(cos[..., :half].to(wide), sin[..., :half].to(wide))
    run = kernel_for(q, rope)
    if unsqueeze_dim == 2:  # heads behind positions, as moefold has them
        return run(q, angles), run(k, angles)
    q_BSHD = run(q.transpose(1, 2), angles)
    k_BSHD = run(k.transpose(1, 2), angles)
    return q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2)


def shifted_labels(labels_BS: Tensor) -> Tensor:
    """Of each position the label of the next; the last has none."""
    padded = F.pad(labels_BS, (0, 1), value=IGNORE_INDEX)
    return padded[:, 1:]


def head_loss(hidden_BSD: Tensor, head: nn.Linear, labels_BS: Tensor, items: Tensor | int | None) -> Tensor:
    """The mean loss of labels that are already shifted; `items`: divide by so many instead of counting labels."""
    x_TD = hidden_BSD.flatten(0, 1)
    labels_T = labels_BS.flatten()
    loss = kernels_for(x_TD)[cross_entropy]
    total = loss(x_TD, head.weight, labels_T)
    if items is None:
        items = (labels_T != IGNORE_INDEX).sum()
    return total / items
