"""AdamW as a rule: two moments for every element, each in a type of its own (optim/moments.py), and fp32 main weights
beside a model in lower precision, or coarser ones or none: what is coarser is rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.visiting_states import CHUNK_ELEMENTS
from moefold.comm.host_copies import ToHost
from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.adamw import adamw, adamw_fused
from moefold.kernels.optimizer.adamw_blocks import adamw_blocks
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, AdamWScalars, adamw_scalars
from moefold.kernels.optimizer.decode_moment import decode_moment
from moefold.layout.tape_entries import one_entry
from moefold.optim.block_copies import PartToUpdate, parts_to_update
from moefold.optim.device_visits import move_to_host, open_visits, operands_in_parts, visit_device
from moefold.optim.host_states import HostStream, chunk_windows
from moefold.optim.moments import moment_types, new_moment
from moefold.optim.rule import (
    BucketShare,
    RuleState,
    StateKinds,
    StepNumbers,
    first_element,
    main_values_alone,
    stochastic_rounding_seed,
    weight_decay_of,
    window_of,
)
from moefold.optim.step_scalars import ROW_ALIGNMENT
from moefold.shard.block_values import BlockValues, CodesAndScales, codes_and_scales


class UpdateNumbers(NamedTuple):
    """What an update reads besides the tensors of a share, in the order of the op `adamw`."""

    scale: Tensor
    scalars: Tensor
    options: AdamWOptions

    def of_window(self, share: BucketShare, window: slice) -> UpdateNumbers:
        """Those of a window whose states began together, of those of the whole share."""
        first = share.begin_of(window) * ROW_ALIGNMENT
        last = first + ROW_ALIGNMENT
        return self._replace(scalars=self.scalars[first:last])


class AdamW:
    kinds: StateKinds = ("mean", "mean_square")
    whole = False

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        common = (optim.beta1, optim.beta2)
        beta1, beta2 = group.betas or common
        eps = optim.eps
        if group.eps is not None:
            eps = group.eps
        decay = weight_decay_of(group, optim)
        stochastic = optim.rounding == "stochastic"
        stochastic_main = optim.main_rounding == "stochastic"
        self.options = AdamWOptions(beta1, beta2, eps, decay, stochastic, stochastic_main)
        self.moments = moment_types(optim)
        self.adamw = one_entry(kernels[adamw])
        self.adamw_blocks = one_entry(kernels[adamw_blocks])
        self.decode_moment = kernels[decode_moment]
        self.states_on_host = optim.states == "host"
        self.updates_on_host = optim.update == "host"
        self.window_gib = optim.states_window_gib
        self.host_stream: HostStream | None = None

    def options_of(self, share: BucketShare) -> AdamWOptions:
        """The options of a bucket: norms and biases do not decay."""
        if share.bucket.decays:
            return self.options
        return self.options._replace(decay=0.0)

    def state(self, share: BucketShare) -> RuleState:
        weights = share.weights
        wide = share.wide_dtype
        first, second = self.moments
        state: RuleState = {}
        state["mean"] = new_moment(first, weights, wide, False, self.decode_moment)
        state["mean_square"] = new_moment(second, weights, wide, True, self.decode_moment)
        return state

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> StepNumbers:
        """For each begin of states the numbers of a step, counted from there."""
        options = self.options_of(share)
        seed = stochastic_rounding_seed(step, share.number)
        rows: list[float] = []
        for begin in share.begins:
            steps_since = max(1, step - begin.updates)
            row = adamw_scalars(steps_since, lr, options, seed)
            rows += aligned_row(row)
        return rows

    def move_states(self, share: BucketShare, stream: HostStream | None) -> HostStream | None:
        if not self.states_on_host:
            return stream
        move_to_host(share)
        if not self.updates_on_host:
            windows = share_windows(share)
            stream = open_visits(share, windows, stream, self.window_gib)
            self.host_stream = stream
        return stream

    def update(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        options = self.options_of(share)
        numbers = UpdateNumbers(scale, scalars, options)
        if self.updates_on_host:
            self.update_on_host(share, numbers)
        elif self.host_stream is not None:
            self.update_visiting_states(share, self.host_stream, numbers)
        else:
            self.update_in_place(share, numbers)

    def update_visiting_states(
        self,
        share: BucketShare,
        stream: HostStream,
        numbers: UpdateNumbers,
    ) -> None:
        """Update chunk by chunk while states visit the device. Numbers of the step are copied, since those of the next
        step may come before the last update."""
        _, weights = operands_in_parts(share)
        gradient = share.kept_gradient
        windows = share_windows(share)
        scalars = numbers.scalars.clone()
        numbers = numbers._replace(scalars=scalars)

        def update_window(
            number: int,
            main: CodesAndScales,
            mean: CodesAndScales,
            square: CodesAndScales,
        ) -> None:
            window = windows[number]
            beside = window_of(weights, window)
            first = first_element(share, window)
            g = codes_and_scales(gradient, window)
            operands = (main.codes, g.codes, mean.codes, square.codes, beside)
            scales = (mean.scales, square.scales, main.scales, g.scales)
            numbers_here = numbers.of_window(share, window)
            self.adamw(*operands, *numbers_here, first, *scales)

        visit_device(share, windows, stream, update_window, (numbers.scale, scalars))

    def update_on_host(self, share: BucketShare, numbers: UpdateNumbers) -> None:
        """Update on the CPU: gradients come from the device chunk by chunk, the next while one is used, and weights go
        back. Weights that are main weights themselves come too. Waits for the device."""
        main, weights = operands_in_parts(share)
        assert isinstance(main, Tensor), "the host updates fp32 states"
        scale = numbers.scale.cpu()
        if not scale.isfinite():
            return
        numbers = numbers._replace(scale=scale, scalars=numbers.scalars.cpu())
        gradient = share.gradient
        means = share.state["mean"]
        squares = share.state["mean_square"]
        windows = share_windows(share)
        next_windows = iter(windows)
        first_window = next(next_windows)
        arriving = ToHost(gradient[first_window])
        for window in windows:
            g = arriving.read()
            next_window = next(next_windows, None)
            if next_window is not None:
                arriving = ToHost(gradient[next_window])
            mean = codes_and_scales(means, window)
            square = codes_and_scales(squares, window)
            beside = window_of(weights, window)
            rounded = None
            if beside is not None:
                # torch's pinned memory: the allocator knows of copies under way when it is freed
                rounded = torch.empty_like(beside, device="cpu", pin_memory=beside.is_cuda)
            part = main[window]
            held = ToHost(part).read()
            operands = (held, g, mean.codes, square.codes, rounded)
            adamw_fused(*operands, *numbers.of_window(share, window))
            if held is not part:
                part.copy_(held, non_blocking=True)
            if beside is not None and rounded is not None:
                beside.copy_(rounded, non_blocking=True)

    def update_in_place(self, share: BucketShare, numbers: UpdateNumbers) -> None:
        storage = share.storage
        fused = storage.fused_operands()
        main, weights = fused or main_values_alone(storage)
        gradient = share.kept_gradient
        means = share.state["mean"]
        squares = share.state["mean_square"]
        dtype = share.weights.dtype
        is_plain = isinstance(main, Tensor) and isinstance(gradient, Tensor)
        can_fuse = fused is not None and is_plain
        parts = self.parts_of(share, can_fuse)
        for window, copy in parts:
            mean = codes_and_scales(means, window)
            square = codes_and_scales(squares, window)
            beside = window_of(weights, window)
            first = first_element(share, window)
            kept = codes_and_scales(main, window)
            g = codes_and_scales(gradient, window)
            operands = (kept.codes, g.codes, mean.codes, square.codes, beside)
            numbers_here = numbers.of_window(share, window)
            if copy is None:
                scales = (mean.scales, square.scales, kept.scales, g.scales)
                self.adamw(*operands, *numbers_here, first, *scales)
            else:
                self.adamw_blocks(*operands, *numbers_here, first, *copy.tensors, copy.rule, dtype)
        if fused is None:
            assert isinstance(main, Tensor)
            storage.refresh_weights(main)

    def parts_of(self, share: BucketShare, can_fuse: bool) -> Iterator[PartToUpdate]:
        """Windows of the share whose states began together, with the FP8 copies that the update writes."""
        for whole, copy in self.parts_with_copies(share, can_fuse):
            for window in share.cut_by_begins(whole):  # a copy is of one parameter, which is not cut
                yield window, copy

    def parts_with_copies(self, share: BucketShare, can_fuse: bool) -> Iterable[PartToUpdate]:
        """Windows of the share, with the FP8 copies that the update writes: none where states have blocks."""
        moments = share.state.values()
        has_blocks = any(isinstance(moment, BlockValues) for moment in moments)
        if can_fuse and not has_blocks:
            return parts_to_update(share)
        size = len(share.weights)
        whole = slice(0, size)
        return [(whole, None)]


def aligned_row(row: AdamWScalars) -> list[float]:
    """A row of numbers, padded to the size of the rows on the device."""
    missing = ROW_ALIGNMENT - len(row)
    padding = [0.0] * missing
    return [*row, *padding]


def share_windows(share: BucketShare) -> list[slice]:
    """Chunks of a share whose states began together."""
    windows: list[slice] = []
    for chunk in chunk_windows(len(share.weights), CHUNK_ELEMENTS):
        windows += share.cut_by_begins(chunk)
    return windows
