"""Spikes of loss and gradient norm, judged on the device: values far above those of recent steps.

    limit = median + `deviations` x (median distance from the median), of the last 64 steps; at least 1 % of the median
                                                                       counts as distance

Skipped spikes do not count as recent steps, but after five in a row the next step is taken: the level has changed. All
of the state is on the device and in checkpoints, so that a resumed run skips the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

HISTORY = 64  # steps
LEAST_HISTORY = 16
LEAST_DISTANCE = 0.01  # of the median
MOST_SKIPPED = 5  # in a row


class SpikeJudge:
    """H last steps of two measures, loss and norm."""

    def __init__(self, deviations: float, skips: bool, device: torch.device):
        self.deviations = deviations
        self.skips = skips
        self.history_2H = torch.zeros(2, HISTORY, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_row = torch.zeros_like(self.count)

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the step is a spike, and whether it may update anything; the step becomes a recent one unless it is
        skipped or not finite."""
        now_2 = torch.stack((loss, norm)).double()
        middle_2 = self.median_of(self.history_2H)
        distance_2H = (self.history_2H - middle_2[:, None]).abs()
        distance_2 = self.median_of(distance_2H)
        least_2 = LEAST_DISTANCE * middle_2.abs()
        limit_2 = middle_2 + self.deviations * distance_2.maximum(least_2)
        is_known = self.count >= LEAST_HISTORY
        is_spike = (now_2 > limit_2).any() & is_known
        updates = torch.ones_like(is_spike)
        if self.skips:
            updates = ~is_spike | (self.skipped_in_row >= MOST_SKIPPED)
        self.skipped_in_row.copy_((self.skipped_in_row + 1) * ~updates)
        self.remember(now_2, updates & now_2.isfinite().all())
        return is_spike, updates

    def median_of(self, values_2H: Tensor) -> Tensor:
        """The lower median of the steps that are known."""
        number_H = torch.arange(HISTORY, device=values_2H.device)
        known_2H = values_2H.where(number_H < self.count, torch.inf)
        in_order_2H, _ = known_2H.sort()
        known = self.count.clamp(1, HISTORY)
        place_21 = ((known - 1) // 2).expand(2, 1)
        median_21 = in_order_2H.gather(1, place_21)
        return median_21[:, 0]

    def remember(self, now_2: Tensor, counts: Tensor) -> None:
        place_21 = (self.count % HISTORY).expand(2, 1)
        before_21 = self.history_2H.gather(1, place_21)
        value_21 = now_2[:, None].where(counts, before_21)
        self.history_2H.scatter_(1, place_21, value_21)
        self.count += counts

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        yield "history", self.history_2H
        yield "count", self.count
        yield "skipped_in_row", self.skipped_in_row
