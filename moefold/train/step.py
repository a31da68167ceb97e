"""One training step. Read this first: follow the calls in order and you have been a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moefold.comm.collectives import sum_
from moefold.config.refused import Failed
from moefold.data.loader import Batch
from moefold.optim.learning_rate import learning_rate
from moefold.train.assemble import Run


@dataclass(frozen=True)
class StepReport:
    """What one step gave, over the whole global batch."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    counts_LE: torch.Tensor  # how many tokens each expert of each MoE layer got


def train_step(run: Run, batch: Batch) -> StepReport:
    totals = torch.zeros(2, dtype=torch.float64, device=run.world.device)  # cross-entropy, tokens
    run.gradients.begin()
    parts = list(batch.microbatches(run.config.train.micro_batch))
    for part in parts:
        losses = run.model(part.tokens_BS, part.labels_BS)  # sums over this part's tokens
        if part is parts[-1]:
            run.gradients.expect_last()  # buckets leave for other ranks as they are finished
        (losses.cross_entropy + losses.balance).backward()  # gradients add up in the buckets
        totals += torch.stack((losses.cross_entropy.detach(), run.model.labelled(part.labels_BS)))

    sum_(totals, run.world.axis("dp", "cp"))
    run.gradients.finish(tokens=totals[1])  # sum over ranks, divide once
    norm = run.gradients.clip(run.config.optim.max_norm)  # one norm over dense and expert parameters
    loss, tokens, length = torch.stack((totals[0] / totals[1], totals[1], norm)).tolist()
    refuse_nonsense(run, loss, length)

    number = run.step + 1
    lr = learning_rate(number, run.config.train.steps, run.config.optim)
    run.optimizer.step(number, lr)  # update this rank's share of the weights
    run.parameters.publish()  # hand it to the other ranks
    counts_LE = run.model.balance()  # even out expert load
    run.step = number
    return StepReport(loss, length, lr, int(tokens), counts_LE)


def refuse_nonsense(run: Run, loss: float, norm: float) -> None:
    """Stop before a loss or a gradient that is no number reaches the weights."""
    if loss == loss and norm == norm and abs(loss) != float("inf") and abs(norm) != float("inf"):
        return
    raise Failed(
        f"step {run.step + 1}: loss is {loss:g} and gradient norm is {norm:g}; the weights were not touched. "
        f"The last checkpoint in {run.out / 'checkpoints'} is sound: continue with --resume auto and a lower "
        f"--optim.lr (now {run.config.optim.lr:g}) or --optim.max_norm (now {run.config.optim.max_norm:g})"
    )
