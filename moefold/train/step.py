"""One training step. Read this first: follow the calls in order and you have been a token.

Nothing here waits for the device. What a step gave is on its way to the host while the next one is begun, so whether it
was sound is decided on the device: a loss or a gradient that is no number, in this step or an earlier one, keeps every
weight as it is, and the host hears of it a step later.
"""

from __future__ import annotations

from functools import cached_property
from math import isfinite

import torch

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_copies import DeviceTime, ToHost
from moefold.config.errors import RunFailure
from moefold.data.loader import Batch
from moefold.model.moe.balance import LayerLoads
from moefold.optim.learning_rate import learning_rate
from moefold.train.assemble import Run


class StepReport:
    """What one step gave, over the whole global batch: to be asked for when it is needed, since reading any of it but
    `number` and `lr` waits until the device is done with the step."""

    def __init__(self, number: int, lr: float, begun: DeviceTime, numbers: torch.Tensor, loads: LayerLoads):
        self.number, self.lr, self.begun = number, lr, begun
        self.numbers, self.layers, self.counts = ToHost(numbers), loads.layers, [ToHost(x) for x in loads[1:]]
        self.ended = DeviceTime(numbers.device)

    @cached_property
    def read(self) -> list[float]:
        return self.numbers.read().tolist()

    @property
    def loss(self) -> float:
        return self.read[0]

    @property
    def mtp_loss(self) -> float:
        """Mean over the layers that look further ahead; 0 if there are none."""
        ahead = self.read[1:-2]
        return sum(ahead) / max(1, len(ahead))

    @property
    def tokens(self) -> int:
        return int(self.read[-2])

    @property
    def grad_norm(self) -> float:
        return self.read[-1]

    @property
    def loads(self) -> LayerLoads:
        """What the routing of each MoE layer came to."""
        return LayerLoads(self.layers, *(x.read() for x in self.counts))

    @property
    def seconds(self) -> float:
        return self.begun.seconds_until(self.ended)


def train_step(run: Run, batch: Batch) -> StepReport:
    begun = DeviceTime(run.world.device)
    parts = list(batch.microbatches(run.config.train.micro_batch))
    tokens_1M = count_labels(run, batch)  # of the whole global batch, for each token that is predicted ahead
    if run.config.model.moe.balance.aux_over == "global_batch":
        survey_routing(run, parts)
    run.gradients.begin()
    losses_1M = run.executor.train(
        parts, loss_weights(run, tokens_1M)
    )  # forward and backward; gradients add up in buckets

    losses_1M = all_reduce_no_grad(all_reduce_no_grad(losses_1M, run.world.axis("dp", "cp")), run.world.axis("pp"))
    run.gradients.finish(tokens=tokens_1M[0])  # sum over ranks, to be divided once
    norm = run.clipping.clip_units(run.gradients, run.gradients.units)  # one norm over dense and expert parameters
    numbers = torch.cat((losses_1M / tokens_1M.clamp(min=1), tokens_1M[:1], norm[None]))
    run.all_finite &= numbers.isfinite().all()  # once it is not, it stays so

    number = run.step + 1
    lr = learning_rate(number, run.config.train.steps, run.config.optim)
    run.gradients.invalidate_unless(run.all_finite)  # a NaN scale updates nothing
    run.before_update()
    run.optimizer.step(number, lr, run.gradients.scales)  # update this rank's share of the weights
    run.parameters.publish()  # hand it to the other ranks
    loads = run.model.balance(run.all_finite, lr / run.config.optim.lr)  # even out expert load
    run.step = number
    return StepReport(number, lr, begun, numbers, loads)


def count_labels(run: Run, batch: Batch) -> torch.Tensor:
    """How many tokens of the global batch have a label to predict, one token ahead and further: (1 + M,)."""
    return all_reduce_no_grad(run.model.labelled_token_counts(batch.labels_BS).double(), run.world.axis("dp", "cp"))


def loss_weights(run: Run, tokens_1M: torch.Tensor) -> torch.Tensor:
    """Of the sums of losses: one for the model's own. Those of further tokens are means over their own labels, in a sum
    that will be divided by the number of the first."""
    m = run.config.model
    ahead_M = m.mtp_loss / max(1, m.mtp) * tokens_1M[0] / tokens_1M[1:].clamp(min=1)
    return torch.cat((torch.ones_like(tokens_1M[:1]), ahead_M))


def survey_routing(run: Run, parts: list[Batch]) -> None:
    """A forward pass over all of the batch for its routing alone: a loss over the global batch weighs each token's
    scores by counts that are known only at the end."""
    run.executor.forward_only(parts, lambda carry: None)
    run.model.remember_batch_shares()


def refuse_non_finite(run: Run, report: StepReport) -> None:
    """Stop a run whose loss or gradient is no number. Neither that step nor one begun since touched the weights."""
    loss, norm = report.loss, report.grad_norm
    if all(map(isfinite, report.read)):
        return
    raise RunFailure(
        f"step {report.number}: loss is {loss:g} and gradient norm is {norm:g}; the weights were not touched. "
        f"The last checkpoint in {run.out / 'checkpoints'} is sound: continue with --resume auto and a lower "
        f"--optim.lr (now {run.config.optim.lr:g}) or --optim.max_norm (now {run.config.optim.max_norm:g})"
    )
