"""One training step. Read this first, and follow the calls in order (docs/walk.md).

Nothing here waits for the device. The numbers of a step are copied to the host while the next step is launched, so
whether they are finite is decided on the device: a loss or gradient that is not finite, in this step or an earlier one,
leaves every weight as it is, and the host reads of it a step later.
"""

from __future__ import annotations

from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_copies import DeviceTime, ToHost
from moefold.config.errors import RunFailure
from moefold.data.loader import Batch
from moefold.model.moe.balance import LayerLoads
from moefold.optim.learning_rate import learning_rate
from moefold.pipeline.executor import LossWeights
from moefold.precision.operand_statistics import StageOperands
from moefold.train.assemble import Run


class StepReport:
    """What one step gave, over the whole global batch: to be asked for when it is needed, since reading any of it but
    `number` and `lr` waits until the device is done with the step."""

    def __init__(
        self,
        number: int,
        lr: float,
        begun: DeviceTime,
        numbers: Tensor,
        loads: LayerLoads,
        operands: StageOperands | None = None,
    ):
        self.number = number
        self.lr = lr
        self.begun = begun
        self.numbers = ToHost(numbers)
        self.layers, *counts = loads
        self.counts = [ToHost(count) for count in counts]
        self.operands = operands  # of FP8 products, in a step that records them
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
        count = max(1, len(ahead))
        return sum(ahead) / count

    @property
    def tokens(self) -> int:
        return int(self.read[-2])

    @property
    def grad_norm(self) -> float:
        return self.read[-1]

    @property
    def loads(self) -> LayerLoads:
        """What the routing of each MoE layer came to."""
        counts = [count.read() for count in self.counts]
        return LayerLoads(self.layers, *counts)

    @property
    def seconds(self) -> float:
        return self.begun.seconds_until(self.ended)


def train_step(run: Run, batch: Batch) -> StepReport:
    config = run.config
    begun = DeviceTime(run.world.device)
    microbatches = list(batch.microbatches(config.train.micro_batch))
    tokens_1M = count_labels(run, batch)  # of the global batch, for each token that is predicted ahead
    if config.model.moe.balance.aux_over == "global_batch":
        survey_routing(run, microbatches)

    # Forward and backward of all microbatches; gradients add up in buckets.
    with run.phase("begin"):
        run.gradients.begin()
        run.scale_histories.begin_step()
        run.operand_statistics.begin_step(run.step + 1)
    weights = loss_weights(run, batch, tokens_1M)
    losses_1M = run.executor.train(microbatches, weights)
    losses_1M = sum_over_ranks(run, losses_1M)

    # Gradients are sums over ranks; division by tokens and clipping are one factor, which the optimizer applies.
    with run.phase("sum gradients"):
        run.gradients.finish(tokens=tokens_1M[0])
    with run.phase("norm"):
        norm = run.clipping.clip_units(run.gradients, run.gradients.units)
    means_1M = losses_1M / tokens_1M.clamp(min=1)
    numbers = torch.cat((means_1M, tokens_1M[:1], norm[None]))
    run.all_finite &= numbers.isfinite().all()  # once false, it stays so
    run.gradients.invalidate_unless(run.all_finite)  # a NaN factor updates nothing

    # Update this rank's share of the weights, gather the others', move the selection biases, record delayed scales.
    number = run.step + 1
    lr = learning_rate(number, config.train.steps, config.optim)
    run.before_update()
    with run.phase("update"):
        run.optimizer.step(number, lr, run.gradients.scales)
    with run.phase("publish"):
        run.parameters.publish()
    with run.phase("balance"):
        share_of_peak = lr / config.optim.lr
        loads = run.model.balance(run.all_finite, share_of_peak)
    with run.phase("scales"):
        run.scale_histories.end_step(run.all_finite)
        operands = run.operand_statistics.end_step()
    run.step = number
    return StepReport(number, lr, begun, numbers, loads, operands)


def take_next_step(run: Run) -> StepReport:
    """A training step on the next batch of the run."""
    batch = run.loader.next_batch()
    return train_step(run, batch)


def sum_over_ranks(run: Run, losses_1M: Tensor) -> Tensor:
    """Over the ranks that hold other tokens, then over pipeline ranks, of which one has the losses and the others
    zeros."""
    of_all_tokens_1M = all_reduce_no_grad(losses_1M, run.world.dp_cp)
    return all_reduce_no_grad(of_all_tokens_1M, run.world.axis("pp"))


def count_labels(run: Run, batch: Batch) -> Tensor:
    """How many tokens of the global batch have a label to predict, one token ahead and further: (1 + M,)."""
    own_1M = run.model.labelled_token_counts(batch.labels_BS)
    return all_reduce_no_grad(own_1M.double(), run.world.dp_cp)


def loss_weights(run: Run, batch: Batch, tokens_1M: Tensor) -> LossWeights:
    """Weights of losses in a sum that is divided by the number of labelled tokens: one for the model's own. A loss of
    multi-token prediction is a mean over its own labels; balance losses are means over all tokens."""
    model = run.config.model
    weight = model.mtp_loss / max(1, model.mtp)
    own, ahead_M = tokens_1M[:1], tokens_1M[1:]
    weights_M = weight * own / ahead_M.clamp(min=1)
    weights_1M = torch.cat((torch.ones_like(own), weights_M))
    all_tokens = batch.tokens_BS.numel() * run.world.axis("dp").size
    return LossWeights(weights_1M, own[0] / all_tokens)


def survey_routing(run: Run, microbatches: list[Batch]) -> None:
    """A forward pass over the whole batch for its routing alone: a balance loss over the global batch needs counts that
    are known only at its end."""
    run.executor.forward_only(microbatches, lambda carry: None)
    run.model.remember_batch_shares()


def refuse_non_finite(run: Run, report: StepReport) -> None:
    """Stop a run whose loss or gradient is not finite. Neither that step nor one launched since changed the weights."""
    loss, norm = report.loss, report.grad_norm
    if all(map(isfinite, report.read)):
        return
    raise RunFailure(
        f"step {report.number}: loss is {loss:g} and gradient norm is {norm:g}; the weights were not touched. "
        f"The last checkpoint in {run.out / 'checkpoints'} is sound: continue with --resume auto and a lower "
        f"--optim.lr (now {run.config.optim.lr:g}) or --optim.max_norm (now {run.config.optim.max_norm:g})"
    )
