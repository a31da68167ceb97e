"""The optimizer: a rule for every parameter group, applied to this rank's share of each bucket (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.parameter_groups import GroupRule, ParameterGroups
from moefold.optim.rule import BucketShare, Rule
from moefold.optim.step_scalars import StepScalars
from moefold.shard.buckets import Bucket
from moefold.shard.storage import LogicalValues

StateValues = torch.Tensor | LogicalValues
MAIN_KIND = "main"


class Optimizer:
    """`rules` by the names of the buckets' groups. The state of a bucket's share is made by the rule of its group; main
    weights are made and kept by the storage of the bucket."""

    def __init__(self, buckets: list[Bucket], rules: Mapping[str, GroupRule]):
        self.rules = rules
        self.shares = [BucketShare(number, bucket) for number, bucket in enumerate(buckets)]
        self.units = list(dict.fromkeys(bucket.unit for bucket in buckets))
        for share in self.shares:
            share.storage.open_main(share.bucket.share)
            share.state = self.rule_of(share).state(share)
        rows = self.step_rows(1, 0.0)
        columns = max(map(len, rows), default=0)
        device = buckets[0].weights.device if buckets else torch.device("cpu")
        self.scalars = StepScalars(len(rows), columns, device)

    def rule_of(self, share: BucketShare) -> Rule:
        return self.rules[share.bucket.group].rule

    def step_rows(self, number: int, lr: float) -> list[list[float]]:
        """The numbers of a step for each bucket."""
        rows: list[list[float]] = []
        for share in self.shares:
            group = self.rules[share.bucket.group]
            row = group.rule.scalars(share, number, lr * group.lr_factor)
            rows.append(list(row))
        return rows

    def step(self, number: int, lr: float, scales: Mapping[str, torch.Tensor] | None = None) -> None:
        """Update everything. `number` counts from one; gradients are multiplied by the scale of their unit. Other ranks
        have the new weights once they are published."""
        self.begin_step(number, lr)
        for unit in self.units:
            scale = None if scales is None else scales[unit]
            self.update(unit, scale)

    def begin_step(self, number: int, lr: float) -> None:
        """Write the numbers of a step to the device, before the updates of its units."""
        self.scalars.write(self.step_rows(number, lr))

    def update(self, unit: str, scale: torch.Tensor | None = None) -> None:
        """Update the parameters of one unit from their gradients, times `scale`."""
        for share in self.shares:
            if share.bucket.unit != unit:
                continue
            factor = share.gradient.new_ones((), dtype=torch.float64) if scale is None else scale
            row = self.scalars.row(share.number)
            self.rule_of(share).update(share, factor, row)

    def state(self) -> Iterator[tuple[DeclaredParameter, str, int, StateValues]]:
        """Every piece of state on this rank: (parameter, kind, first, values), the values being those of the flattened
        parameter from `first` on. Loading into them is enough."""
        for share in self.shares:
            kinds = self.kinds_of(share)
            for piece in share.bucket.pieces():
                for kind, flat in kinds.items():
                    yield piece.parameter, kind, piece.first, flat[piece.window]

    def kinds_of(self, share: BucketShare) -> dict[str, StateValues]:
        """Flat values of a share by kind: the rule's state, and main weights where the model's are not."""
        kinds: dict[str, StateValues] = dict(share.state)
        main = share.storage.logical()
        if main is not None:
            kinds[MAIN_KIND] = main
        return kinds

    def bytes(self) -> dict[str, int]:
        """Memory of this rank's state by kind."""
        total = {MAIN_KIND: 0}
        for share in self.shares:
            total[MAIN_KIND] += share.storage.main_bytes()
            for kind, values in share.state.items():
                total[kind] = total.get(kind, 0) + values.nbytes
        return total


def build_optimizer(buckets: list[Bucket], optim: OptimConfig, kernels: BoundKernels) -> Optimizer:
    """The optimizer of a configuration, for buckets that were filled with its groups."""
    groups = ParameterGroups(optim, kernels)
    return Optimizer(buckets, groups.rules)
