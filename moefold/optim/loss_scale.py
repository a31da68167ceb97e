"""Loss scale: the factor of losses before backward, which the update divides out again, and what an overflow does.

A model in fp16 needs one: small gradients would become zero, large ones infinite. The dynamic scale is halved by a
step that overflows, and doubled after so many steps without one. A step that overflows is skipped: on the device, and
so on all ranks alike, since all of them see the same gradient norm. Other models have the scale one, and a step that is
not finite stops everything after it.

    step        1      2      3            4      5      6
    scale       65536  65536  65536        32768  32768  65536     growth after 2 clean steps
    gradients   finite finite not finite   finite finite finite
    updates     1      2      skipped      3      4      5         the number that AdamW corrects its moments by
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from moefold.comm.host_copies import ToHost
from moefold.config.run import Config
from moefold.optim.step_scalars import UpdateNumber
from moefold.shard.gradients import device_number

SMALLEST_SCALE = 1.0
LARGEST_SCALE = 2.0**32
STEPS_BEHIND = 2  # the host has read the counts of all steps but so many


NamedState = Iterator[tuple[str, Tensor]]


class LossScale(Protocol):
    scale: Tensor  # fp64, on the device
    all_finite: Tensor  # on the device: whether no step has stopped updates for good

    def loss_factor(self, tokens: Tensor) -> Tensor:
        """What summed losses over so many tokens of the global batch are multiplied by."""
        ...

    def update_number(self, step: int) -> UpdateNumber:
        """The number of the update that a step would be; to be asked for before `judge`."""
        ...

    def judge(self, finite: Tensor) -> Tensor:
        """Whether the step that has just been computed may update anything."""
        ...

    def forget_counts(self) -> None:
        """Declare that state was loaded: what the host has read no longer holds."""
        ...

    def can_go_on(self, scale: float) -> bool:
        """Whether a run goes on behind a step that was not finite with this scale."""
        ...

    def named_state(self) -> NamedState: ...


class UnitLossScale:
    """One. After a step that was not finite nothing is updated any more."""

    def __init__(self, device: torch.device):
        self.scale = device_number(1.0, device)
        self.all_finite = torch.ones((), dtype=torch.bool, device=device)

    def loss_factor(self, tokens: Tensor) -> Tensor:
        return self.scale

    def update_number(self, step: int) -> UpdateNumber:
        return UpdateNumber(step)

    def judge(self, finite: Tensor) -> Tensor:
        self.all_finite &= finite
        return self.all_finite

    def forget_counts(self) -> None: ...

    def can_go_on(self, scale: float) -> bool:
        return False

    def named_state(self) -> NamedState:
        yield from ()


class DynamicLossScale:
    """Of a mean over tokens, as other trainers have it. All of its state is on the device and in checkpoints."""

    def __init__(self, first: float, growth_interval: int, device: torch.device):
        self.growth_interval = growth_interval
        self.scale = device_number(first, device)
        self.all_finite = torch.ones((), dtype=torch.bool, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int64, device=device)  # since the scale changed
        self.skipped = torch.zeros_like(self.clean_steps)
        self.counts = deque[ToHost]()  # of skipped steps, after each of the last steps
        self.known_skipped: int | None = None

    def loss_factor(self, tokens: Tensor) -> Tensor:
        """The scale over a power of two near the number of tokens: what is multiplied by it keeps its digits."""
        count = tokens.clamp(min=1)
        exponent = count.log2().ceil()
        near = exponent.exp2()
        return self.scale / near

    def update_number(self, step: int) -> UpdateNumber:
        """The host knows of all steps but the one before; whether that was skipped, the device knows."""
        if self.known_skipped is None:
            self.known_skipped = int(self.skipped)  # waits, once in a run
        if len(self.counts) == STEPS_BEHIND:
            count = self.counts.popleft()
            self.known_skipped = int(count.read())
        known = self.known_skipped
        was_skipped = self.skipped > known
        return UpdateNumber(step - known, was_skipped)

    def judge(self, finite: Tensor) -> Tensor:
        one_more = self.clean_steps + 1
        clean = one_more * finite
        grows = clean >= self.growth_interval
        growth = 1.0 + grows.double()
        factor = torch.where(finite, growth, 0.5)
        next_scale = self.scale * factor
        next_scale = next_scale.clamp(SMALLEST_SCALE, LARGEST_SCALE)
        self.scale.copy_(next_scale)
        stays = ~grows
        self.clean_steps.copy_(clean * stays)
        self.skipped += ~finite
        skipped_now = self.skipped.clone()
        self.counts.append(ToHost(skipped_now))
        return finite

    def forget_counts(self) -> None:
        self.counts.clear()
        self.known_skipped = None

    def can_go_on(self, scale: float) -> bool:
        return scale > SMALLEST_SCALE

    def named_state(self) -> NamedState:
        yield "scale", self.scale
        yield "clean_steps", self.clean_steps
        yield "skipped", self.skipped


def make_loss_scale(config: Config, device: torch.device) -> LossScale:
    if config.train.precision != "fp16":
        return UnitLossScale(device)
    first = config.precision.loss_scale
    growth_interval = config.precision.loss_scale_growth
    return DynamicLossScale(first, growth_interval, device)
