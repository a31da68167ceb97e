"""The optimizer: a rule for every parameter group, applied to this rank's share of each bucket (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.parameter_groups import GroupRule, ParameterGroups
from moefold.optim.rule import BucketShare, Rule
from moefold.optim.step_scalars import StepScalars
from moefold.shard.buckets import Bucket, units_of_buckets
from moefold.shard.storage import LogicalValues

StateValues = Tensor | LogicalValues
StatePiece = tuple[DeclaredParameter, str, int, StateValues]
UnheldPiece = tuple[DeclaredParameter, int, StateValues]
UnitScales = Mapping[str, Tensor]
MAIN_KIND = "main"


class Optimizer:
    """`rules` by the names of the buckets' groups. The state of a bucket's share is made by the rule of its group; main
    weights are made and kept by the storage of the bucket."""

    def __init__(self, buckets: list[Bucket], rules: Mapping[str, GroupRule]):
        self.rules = rules
        self.units = units_of_buckets(buckets)
        self.shares = [self.open_share(number, bucket) for number, bucket in enumerate(buckets)]
        # Rules give equally many numbers in every step: the first step shows how much memory they take.
        first_rows = self.step_rows(1, 0.0)
        device = buckets[0].weights.device
        self.scalars = StepScalars(first_rows, device)
        self.one = torch.ones((), dtype=torch.float64, device=device)

    def open_share(self, number: int, bucket: Bucket) -> BucketShare:
        """This rank's share of a bucket, with main weights and new state."""
        share = BucketShare(number, bucket)
        share.storage.open_main_weights(bucket.share)
        rule = self.rule_of(share)
        share.state = rule.state(share)
        return share

    def rule_of(self, share: BucketShare) -> Rule:
        return self.rules[share.bucket.group].rule

    def step_rows(self, number: int, lr: float) -> list[list[float]]:
        """The numbers of a step for each bucket."""
        rows: list[list[float]] = []
        for share in self.shares:
            group = self.rules[share.bucket.group]
            group_lr = lr * group.lr_factor
            row = group.rule.step_numbers(share, number, group_lr)
            rows.append(list(row))
        return rows

    def step(self, number: int, lr: float, scales: UnitScales | None = None) -> None:
        """Update everything. `number` counts from one; gradients are multiplied by the scale of their unit. Other ranks
        have the new weights once they are published."""
        self.begin_step(number, lr)
        for unit in self.units:
            scale = None if scales is None else scales[unit]
            self.update(unit, scale)

    def begin_step(self, number: int, lr: float) -> None:
        """Write the numbers of a step to the device, before the updates of its units."""
        rows = self.step_rows(number, lr)
        self.scalars.write_rows(rows)

    def update(self, unit: str, scale: Tensor | None = None) -> None:
        """Update the parameters of one unit from their gradients, times `scale`."""
        scale = self.one if scale is None else scale
        for share in self.shares:
            if share.bucket.unit != unit:
                continue
            row = self.scalars.row_of(share.number)
            rule = self.rule_of(share)
            rule.update(share, scale, row)

    def state(self) -> Iterator[StatePiece]:
        """Every piece of state on this rank: (parameter, kind, first, values), the values being those of the flattened
        parameter from `first` on. Loading into them is enough."""
        for share in self.shares:
            kinds = self.kinds_of(share)
            for piece in share.bucket.pieces():
                for kind, flat in kinds.items():
                    values = flat[piece.window]
                    yield piece.parameter, kind, piece.first, values

    def unheld_weights(self) -> Iterator[UnheldPiece]:
        """The pieces on this rank of weights that the model has no values of: (parameter, first, values), as `state`
        has them, in the model's dtype."""
        for share in self.shares:
            values = share.storage.unheld_values()
            if values is None:
                continue
            for piece in share.bucket.pieces():
                yield piece.parameter, piece.first, values[piece.window]

    def kinds_of(self, share: BucketShare) -> dict[str, StateValues]:
        """Flat values of a share by kind: the rule's state, and main weights where the model's are not."""
        kinds: dict[str, StateValues] = dict(share.state)
        main = share.storage.logical_values()
        if main is not None:
            kinds[MAIN_KIND] = main
        return kinds

    def bytes(self) -> dict[str, int]:
        """Memory of this rank's state by kind."""
        total = {MAIN_KIND: 0}
        for share in self.shares:
            total[MAIN_KIND] += share.storage.main_weight_bytes()
            for kind, values in share.state.items():
                total[kind] = total.get(kind, 0) + values.nbytes
        return total


def build_optimizer(buckets: list[Bucket], optim: OptimConfig, kernels: BoundKernels) -> Optimizer:
    """The optimizer of a configuration, for buckets that were filled with its groups."""
    groups = ParameterGroups(optim, kernels)
    return Optimizer(buckets, groups.rules)
