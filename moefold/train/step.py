"""One training step. Read this first, and follow the calls in order (docs/walk.md).

Nothing here waits for the device, but for the flag of bounded rows (row_guard.py). The numbers of a step are copied to
the host while the next step is launched, so whether they are finite is decided on the device: a loss or gradient that
is not finite, in this step or an earlier one, leaves every weight as it is, and the host reads of it a step later. In
fp16 such a step alone is skipped (optim/loss_scale.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_copies import DeviceTime, ToHost
from moefold.data.loader import Batch
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.moe.balance import LayerLoads
from moefold.optim.learning_rate import learning_rate
from moefold.pipeline.executor import LossWeights
from moefold.precision.operand_statistics import StageOperands
from moefold.shard.gradients import HeldGradients
from moefold.shard.publish import note_replayed_update
from moefold.train.assemble import Run
from moefold.train.injected_fault import injected_fault


class StepOutputs(NamedTuple):
    """What the device part of a step leaves: loss and other numbers, the load of the experts, gradients, and in a step
    that records them the figures of FP8 operands."""

    numbers: Tensor
    loads: LayerLoads
    gradients: HeldGradients
    operands: StageOperands | None
    units: dict[str, Tensor]  # norms of units that were updated inside backward
    own_losses_1M: Tensor  # of the microbatches of this rank alone
    spike_2: Tensor | None  # whether the step is a spike, and whether it was skipped as one
    overflowed: Tensor | None = None  # whether rows of experts found no room


class StepReport:
    """What one step gave, over the whole global batch: to be asked for when it is needed, since reading any of it but
    `number` and `lr` waits until the device is done with the step."""

    def __init__(self, number: int, lr: float, begun: DeviceTime, outputs: StepOutputs, waste: float | None = None):
        self.number = number
        self.lr = lr
        self.begun = begun
        self.numbers = own_copy(outputs.numbers)
        self.layers, *counts = outputs.loads
        self.counts = [own_copy(count) for count in counts]
        self.operands = outputs.operands  # of FP8 products, in a step that records them
        self.units = {unit: own_copy(norm) for unit, norm in outputs.units.items()}
        self.own_losses = own_copy(outputs.own_losses_1M)
        spike_2 = outputs.spike_2
        self.spike = None if spike_2 is None else own_copy(spike_2)
        self.waste = waste  # the share of padding in a packed batch
        self.is_repeated = False  # since rows of experts found no room
        self.ended = DeviceTime(outputs.numbers.device)

    @cached_property
    def read(self) -> list[float]:
        return self.numbers.read().tolist()

    @property
    def loss(self) -> float:
        return self.read[0]

    @property
    def further_means(self) -> list[float]:
        """Those of the objective behind the loss, such as the losses of layers that look further ahead."""
        return self.read[1:-3]

    @property
    def mtp_loss(self) -> float:
        """Mean over the layers that look further ahead; 0 if there are none."""
        ahead = self.further_means
        count = max(1, len(ahead))
        return sum(ahead) / count

    @property
    def tokens(self) -> int:
        return round(self.read[-3])

    @property
    def grad_norm(self) -> float:
        return self.read[-2]

    @property
    def loss_scale(self) -> float:
        """What the losses of the step were scaled by: 1 but for fp16."""
        return self.read[-1]

    @property
    def is_finite(self) -> bool:
        return all(map(isfinite, self.read))

    @property
    def own_is_finite(self) -> bool:
        """Whether the losses of this rank's microbatches are finite, whatever those of other ranks are."""
        return bool(self.own_losses.read().isfinite().all())

    @property
    def is_spike(self) -> bool:
        return self.spike is not None and bool(self.spike.read()[0])

    @property
    def is_skipped_spike(self) -> bool:
        return self.spike is not None and bool(self.spike.read()[1])

    @property
    def skipped_units(self) -> list[str]:
        """Units that were updated by themselves and left out, since their gradients are not finite."""
        return [unit for unit, norm in self.units.items() if not isfinite(norm.read().item())]

    @property
    def loads(self) -> LayerLoads:
        """What the routing of each MoE layer came to."""
        counts = [count.read() for count in self.counts]
        return LayerLoads(self.layers, *counts)

    @property
    def seconds(self) -> float:
        return self.begun.seconds_until(self.ended)


def own_copy(x: Tensor) -> ToHost:
    """A copy on the host. On a CPU too: the next replay of a tape writes to the same memory, before it is read."""
    return ToHost(x if x.is_cuda else x.clone())


def train_step(run: Run, batch: Batch) -> StepReport:
    begun = DeviceTime(run.world.device)
    number = run.step + 1
    lr = learning_rate(number, run.config.train.steps, run.config.optim)
    write_step_scalars(run, number, lr)
    begin_checksums(run)
    repeated_before = run.row_guard.repeated_steps
    with injected_fault(run, number):
        outputs = take_device_part(run, batch)
        outputs = repeat_without_bounds(run, batch, outputs)
    run.scale_histories.note_recorded()
    run.step = number
    report = StepReport(number, lr, begun, outputs, batch.waste)
    report.is_repeated = run.row_guard.repeated_steps > repeated_before
    return report


def repeat_without_bounds(run: Run, batch: Batch, outputs: StepOutputs) -> StepOutputs:
    """The outputs, or those of the step once more if rows of experts found no room: that step has changed nothing."""
    if outputs.overflowed is None:
        return outputs
    flag = ToHost(outputs.overflowed)
    try:
        overflowed = flag.read()
    finally:  # a lost rank is the cause of what its missing tokens lead to
        run.executor.require_peers()
    if not overflowed:
        return outputs
    run.row_guard.repeated_steps += 1
    with run.row_guard.lifted():
        return compute_step(run, batch)


def begin_checksums(run: Run) -> None:
    if run.checksums is not None and not run.checksums.has_begun:
        run.parameters.await_all_buckets()
        run.checksums.begin()


def write_step_scalars(run: Run, number: int, lr: float) -> None:
    """Write the numbers that change from step to step to the device, where the step reads them."""
    update_number = run.loss_scale.update_number(number)
    run.optimizer.begin_step(update_number, lr)
    share_of_peak = lr / run.config.optim.lr
    run.pace.write_rows([[share_of_peak]])
    run.scale_histories.write_places()


def take_device_part(run: Run, batch: Batch) -> StepOutputs:
    """Compute the step, with graphs of its static parts if the run has such, or replay it."""
    if run.static_graphs is not None:
        compute = partial(compute_step, run, batch)
        return run.static_graphs.take_step(compute, run.is_observed)
    graph = run.graph
    if graph is None:
        return compute_step(run, batch)
    if run.is_observed:
        with graph.around_observed():
            return compute_step(run, batch)
    run.before_update()  # nothing waits inside of a graph, nor for what was begun outside of it
    run.parameters.await_all_buckets()
    if graph.captures_next(batch):
        prepare_capture(run)
    outputs, replayed = graph.take_step(batch, partial(compute_whole_step, run))
    if replayed:
        run.gradients.restore(outputs.gradients)
        note_replayed_update(run.gradients.buckets)
    return outputs


def prepare_capture(run: Run) -> None:
    """Free the gradients of the last eager step. Copies of weights that its update did not write, such as those that
    validation has made since, are forgotten: the graph has to make them in every step."""
    run.gradients.begin()
    note_replayed_update(run.gradients.buckets)
    run.scale_histories.forget_scales()


def compute_whole_step(run: Run, batch: Batch) -> StepOutputs:
    """The device part of a step with the gathers of its weights: a graph ends with all that it began."""
    outputs = compute_step(run, batch)
    run.parameters.await_all_buckets()
    return outputs


def compute_step(run: Run, batch: Batch) -> StepOutputs:
    """The device part of a step. With `memory.graphs whole` it is captured: what it reads of Python must be the same in
    every step."""
    # Forward and backward of all microbatches; gradients add up in buckets. Units may be updated inside backward.
    own_losses_1M, counts_1M, tokens, _ = run_microbatches(run, batch, partial(begin_step, run))
    losses_1M = sum_over_ranks(run, own_losses_1M.clone())

    # Gradients are sums over ranks; division by count and loss scale and clipping are one factor, which the optimizer
    # applies.
    with run.phase("sum gradients"):
        run.updates.await_gradients()
    with run.phase("norm"):
        norm = run.updates.clip_gradients()
    means_1M = losses_1M / counts_1M.clamp(min=1)
    numbers = torch.cat((means_1M, tokens[None], norm[None], run.loss_scale.scale[None]))

    if run.checksums is not None:
        run.parameters.await_all_buckets()
        run.checksums.add_step()

    # Update this rank's share of the weights, gather the others', move the selection biases, record delayed scales.
    updates = run.loss_scale.judge(numbers.isfinite().all())
    spike_2 = None
    if run.spikes is not None:
        is_spike, is_taken = run.spikes.judge(numbers[0], norm)
        updates = updates & is_taken
        spike_2 = torch.stack((is_spike, ~is_taken))
    updates = run.row_guard.allow(updates)
    with run.phase("update"):
        run.updates.update_rest(updates)
        run.qk_clip.rescale_heads(updates)
    if run.checksums is not None:
        run.optimizer.await_updates()
        run.checksums.note_update()
    with run.phase("publish"):
        run.parameters.publish()
    with run.phase("balance"):
        pace = run.pace.row_of(0)[0]
        loads = run.model.balance(updates, pace)
    with run.phase("scales"):
        run.scale_histories.record_step(updates)
        operands = run.operand_statistics.end_step()
    held = run.gradients.held()
    units = run.updates.unit_norms()
    return StepOutputs(numbers, loads, held, operands, units, own_losses_1M, spike_2, run.row_guard.overflowed)


class BatchSums(NamedTuple):
    """Sums of a batch, the first two for each sum of the objective."""

    own_losses_1M: Tensor  # of this rank's microbatches
    counts_1M: Tensor  # of the global batch, what losses are means over, such as tokens with a label
    tokens: Tensor  # of the global batch, those with a label
    divisor: Tensor  # of gradients


def run_microbatches(run: Run, batch: Batch, begin: Callable[[Tensor], None]) -> BatchSums:
    """Forward and backward of all microbatches of this rank. `begin` is called before the first, with the divisor."""
    config = run.config
    microbatches = list(batch.microbatches(config.train.micro_batch))
    counts_1M, tokens = count_labels(run, batch)
    if run.reference is not None:
        microbatches = run.reference.score(microbatches)
    if config.model.moe.balance.aux_over == "global_batch":
        survey_routing(run, microbatches)
    loss_factor = run.loss_scale.loss_factor(counts_1M[0])
    divisor = counts_1M[0] * loss_factor
    begin(divisor)
    weights = loss_weights(run, batch, counts_1M).scaled_by(loss_factor)
    own_losses_1M = run.executor.train(microbatches, weights)
    return BatchSums(own_losses_1M, counts_1M, tokens, divisor)


def begin_step(run: Run, divisor: Tensor) -> None:
    number = run.step + 1
    with run.phase("begin"):
        run.gradients.begin()
        run.row_guard.begin_step()
        run.scale_histories.begin_step()
        run.operand_statistics.begin_step(number)
        run.updates.begin_step(number, divisor, run.loss_scale.all_finite, run.before_update)


def take_next_step(run: Run) -> StepReport:
    """A training step on the next batch of the run."""
    batch = run.loader.next_batch()
    return train_step(run, batch)


def sequences_of_step(run: Run, number: int) -> range:
    """The numbers of a step's sequences in the run's order, for one of the last steps."""
    loader = run.loader
    later_steps = run.step - number + 1
    first = loader.consumed - later_steps * loader.batch
    return range(first, first + loader.batch)


def sum_over_ranks(run: Run, losses_1M: Tensor) -> Tensor:
    """Over the ranks that hold other tokens, then over pipeline ranks, of which one has the losses and the others
    zeros."""
    of_all_tokens_1M = all_reduce_no_grad(losses_1M, run.world.dp_cp)
    return all_reduce_no_grad(of_all_tokens_1M, run.world.axis("pp"))


class LabelCounts(NamedTuple):
    """Of the global batch: what each sum of the objective is divided by, and the tokens with a label."""

    counts_1M: Tensor
    tokens: Tensor


def count_labels(run: Run, batch: Batch) -> LabelCounts:
    both = sum(own_counts(run, part) for part in batch.parts or [batch])
    assert isinstance(both, Tensor)
    both = all_reduce_no_grad(both, run.world.dp_cp)
    return LabelCounts(both[:-1], both[-1])


def own_counts(run: Run, part: Batch) -> Tensor:
    """This cp rank's summands of the counts, the tokens with a label last."""
    own_1M = run.model.loss_counts(part.labels_BS, part.begins_BS, part.cp_size).double()
    labels = part.labels_BS != IGNORE_INDEX
    sharing = run.world.context(part.cp_size).cp
    share = labels.sum()[None].double() / sharing.size  # every cp rank has all labels
    return torch.cat((own_1M, share))


def loss_weights(run: Run, batch: Batch, counts_1M: Tensor) -> LossWeights:
    """Weights of losses in a sum that is divided by the first count; balance losses are means over all tokens."""
    weights_1M = run.model.objective.weights(counts_1M)
    return LossWeights(weights_1M, counts_1M[0] / count_tokens(run, batch))


def count_tokens(run: Run, batch: Batch) -> Tensor | int:
    """How many tokens the global batch has, with a label or without; padding is none."""
    dp = run.world.axis("dp")
    if batch.parts:
        shares = [own_filled(run, part) for part in batch.parts]
        return all_reduce_no_grad(torch.stack(shares).sum(), run.world.dp_cp)
    if batch.filled_B is None:
        return batch.tokens_BS.numel() * dp.size
    return all_reduce_no_grad(batch.filled_B.sum().double(), dp)


def own_filled(run: Run, part: Batch) -> Tensor:
    """This rank's share of the tokens of a packed microbatch, which all ranks of its group have."""
    assert part.filled_B is not None, "its samples are packed"
    sharing = run.world.context(part.cp_size).cp
    return part.filled_B.sum().double() / sharing.size


def survey_routing(run: Run, microbatches: list[Batch]) -> None:
    """A forward pass over the whole batch for its routing alone: a balance loss over the global batch needs counts that
    are known only at its end."""
    run.executor.forward_only(microbatches, lambda carry: None)
    run.model.remember_batch_shares()
