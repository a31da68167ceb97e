"""One training step. Read this first: follow the calls in order and you have been a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moefold.comm.collectives import sum_
from moefold.config.refused import Failed
from moefold.data.loader import Batch
from moefold.model.moe.balance import Loads
from moefold.optim.learning_rate import learning_rate
from moefold.train.assemble import Run


@dataclass(frozen=True)
class StepReport:
    """What one step gave, over the whole global batch."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    mtp_loss: float  # mean over the layers that look further ahead; 0 if there are none
    loads: Loads  # what the routing of each MoE layer came to


def train_step(run: Run, batch: Batch) -> StepReport:
    parts = list(batch.microbatches(run.config.train.micro_batch))
    tokens_1M = count_labels(run, batch)  # of the whole global batch, for each token that is predicted ahead
    if run.config.model.moe.aux_over == "global_batch":
        survey(run, parts)
    run.gradients.begin()
    losses_1M = run.executor.train(parts, weights(run, tokens_1M))  # forward and backward; gradients add up in buckets

    losses_1M = sum_(sum_(losses_1M, run.world.axis("dp", "cp")), run.world.axis("pp"))
    run.gradients.finish(tokens=tokens_1M[0])  # sum over ranks, divide once
    norm = run.gradients.clip(run.config.optim.max_norm)  # one norm over dense and expert parameters
    loss, *ahead, tokens, length = torch.cat((losses_1M / tokens_1M.clamp(min=1), tokens_1M[:1], norm[None])).tolist()
    refuse_nonsense(run, loss, length)

    number = run.step + 1
    lr = learning_rate(number, run.config.train.steps, run.config.optim)
    run.before_update()
    run.optimizer.step(number, lr)  # update this rank's share of the weights
    run.parameters.publish()  # hand it to the other ranks
    loads = run.model.balance()  # even out expert load
    run.step = number
    return StepReport(loss, length, lr, int(tokens), sum(ahead) / max(1, len(ahead)), loads)


def count_labels(run: Run, batch: Batch) -> torch.Tensor:
    """How many tokens of the global batch have a label to predict, one token ahead and further: (1 + M,)."""
    return sum_(run.model.labelled(batch.labels_BS).double(), run.world.axis("dp", "cp"))


def weights(run: Run, tokens_1M: torch.Tensor) -> torch.Tensor:
    """Of the sums of losses: one for the model's own. Those of further tokens are means over their own labels, in a sum
    that will be divided by the number of the first."""
    m = run.config.model
    ahead_M = m.mtp_loss / max(1, m.mtp) * tokens_1M[0] / tokens_1M[1:].clamp(min=1)
    return torch.cat((torch.ones_like(tokens_1M[:1]), ahead_M))


def survey(run: Run, parts: list[Batch]) -> None:
    """A forward pass over all of the batch for its routing alone: a loss over the global batch weighs each token's
    scores by counts that are known only at the end."""
    run.executor.look(parts, lambda carry: None)
    run.model.survey()


def refuse_nonsense(run: Run, loss: float, norm: float) -> None:
    """Stop before a loss or a gradient that is no number reaches the weights."""
    if loss == loss and norm == norm and abs(loss) != float("inf") and abs(norm) != float("inf"):
        return
    raise Failed(
        f"step {run.step + 1}: loss is {loss:g} and gradient norm is {norm:g}; the weights were not touched. "
        f"The last checkpoint in {run.out / 'checkpoints'} is sound: continue with --resume auto and a lower "
        f"--optim.lr (now {run.config.optim.lr:g}) or --optim.max_norm (now {run.config.optim.max_norm:g})"
    )
