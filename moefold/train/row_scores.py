"""Scores of labelled rows on every rank of a layout: data-parallel ranks take rows in turn, all ranks have the sums.

B sequences, S positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.rules import sequence_multiple
from moefold.data.loader import Batch
from moefold.generate.likelihood import score_labels
from moefold.generate.next_logits import PADDING
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.steps import Carry
from moefold.pipeline.executor import Executor


def score_rows(executor: Executor, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """(B, 2): as `ScoreRows` (generate/likelihood.py). All data-parallel ranks have batches of one shape, as exchanges
    of tokens ask, filled up with padding."""
    world = executor.world
    dp = world.dp
    rows = len(tokens_BS)
    tokens_BS = padded_evenly(tokens_BS, PADDING, executor)
    labels_BS = padded_evenly(labels_BS, IGNORE_INDEX, executor)
    own = slice(dp.index, None, dp.size)
    batch = Batch(tokens_BS[own], labels_BS[own])
    parts = microbatches_of_stages(batch, world.pp.size)
    found: list[Tensor] = []

    def keep_scores(carry: Carry) -> None:
        scores_B2 = score_labels(executor.model, carry)
        found.append(scores_B2)

    executor.forward_only(parts, keep_scores)
    sums_B2 = labels_BS.new_zeros(len(labels_BS), 2, dtype=torch.float64)
    if found:  # the last stage is here
        sums_B2[own] = torch.cat(found)
    sums_B2 = all_reduce_no_grad(sums_B2, world.dp_cp)
    sums_B2 = all_reduce_no_grad(sums_B2, world.pp)
    return sums_B2[:rows]


def padded_evenly(x_BS: Tensor, value: int, executor: Executor) -> Tensor:
    """On the device: rows that split over the data-parallel ranks, of a length that splits over those that share
    sequences."""
    world = executor.world
    multiple = sequence_multiple(executor.config.parallel)
    rows, length = x_BS.shape
    missing = -length % multiple
    missing_rows = -rows % world.dp.size
    missing_on_each_side = (0, missing, 0, missing_rows)
    padded_BS = F.pad(x_BS, missing_on_each_side, value=value)
    return padded_BS.to(world.device)


def microbatches_of_stages(batch: Batch, stages: int) -> list[Batch]:
    """As many as there are pipeline stages, if there are so many rows: all stages then have work."""
    rows = len(batch.tokens_BS)
    missing = -rows % stages
    size = (rows + missing) // stages
    parts = batch.microbatches(size)
    return list(parts)
