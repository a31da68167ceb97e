"""The optimizer: a rule for every parameter group, applied to this rank's share of each bucket (ZeRO-1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor

from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.host_states import HostStream
from moefold.optim.parameter_groups import GroupRule, ParameterGroups
from moefold.optim.rule import BegunAfter, BucketShare, KeepsStatesOnHost, Rule, StepNumbers
from moefold.optim.step_scalars import ScalarRows, StepScalars, UpdateNumber
from moefold.shard.buckets import Bucket, BucketPiece, units_of_buckets
from moefold.shard.gradients import device_number
from moefold.shard.storage import LogicalValues

StateValues = Tensor | LogicalValues
StatePiece = tuple[DeclaredParameter, str, int, StateValues]
UnheldPiece = tuple[DeclaredParameter, int, StateValues]
UnitScales = Mapping[str, Tensor]
StepNumber = int | UpdateNumber
Kinds = dict[str, StateValues]
MAIN_KIND = "main"


class Optimizer:
    """`rules` by the names of the buckets' groups. The state of a bucket's share is made by the rule of its group; main
    weights are made and kept by the storage of the bucket."""

    def __init__(self, buckets: list[Bucket], rules: Mapping[str, GroupRule]):
        self.rules = rules
        self.units = units_of_buckets(buckets)
        self.host_stream: HostStream | None = None
        self.shares: list[BucketShare] = []
        for number, bucket in enumerate(buckets):
            share = self.open_share(number, bucket)
            self.shares.append(share)
        first_bucket = buckets[0]
        self.device = first_bucket.weights.device
        self.note_begins({})
        self.one = device_number(1.0, self.device)

    def note_begins(self, begun_after: BegunAfter) -> None:
        """Take note of when the states of parameters began, those not named with the run: before steps are recorded."""
        self.begun_after = dict(begun_after)
        for share in self.shares:
            share.note_begins(begun_after)
        # Rules give equally many numbers in every step: the first step shows how much memory they take.
        first_rows = self.step_rows(1, 0.0)
        self.scalars = StepScalars(first_rows, self.device)

    def open_share(self, number: int, bucket: Bucket) -> BucketShare:
        """This rank's share of a bucket, with main weights and new state."""
        share = BucketShare(number, bucket)
        share.storage.open_main_weights(bucket.share)
        rule = self.rule_of(share)
        share.state = rule.state(share)
        if isinstance(rule, KeepsStatesOnHost):
            self.host_stream = rule.move_states(share, self.host_stream)
        return share

    def settle(self) -> None:
        """Wait until states in host memory are complete."""
        if self.host_stream is not None:
            self.host_stream.settle()

    def rule_of(self, share: BucketShare) -> Rule:
        group = share.bucket.group
        return self.rules[group].rule

    def step_rows(self, number: int, lr: float) -> ScalarRows:
        """The numbers of a step for each bucket."""
        rows: list[StepNumbers] = []
        for share in self.shares:
            group = share.bucket.group
            rule, lr_factor = self.rules[group]
            row = rule.step_numbers(share, number, lr * lr_factor)
            rows.append(row)
        return rows

    def step(self, number: StepNumber, lr: float, scales: UnitScales | None = None) -> None:
        """Update everything. `number` counts from one; gradients are multiplied by the scale of their unit. Other ranks
        have the new weights once they are published."""
        self.begin_step(number, lr)
        self.update_all(scales)
        self.await_updates()

    def await_updates(self) -> None:
        """Let the present stream wait for updates on others. Whoever reads weights of a `Publisher` need not."""
        for share in self.shares:
            share.bucket.await_update()

    def begin_step(self, number: StepNumber, lr: float) -> None:
        """Write the numbers of a step to the device, before the updates of its units."""
        if isinstance(number, int):
            number = UpdateNumber(number)
        rows = self.step_rows(number.highest, lr)
        self.scalars.write_rows(rows)
        if number.is_less is not None:
            one_less = max(1, number.highest - 1)
            rows_of_less = self.step_rows(one_less, lr)
            self.scalars.write_rows_where(number.is_less, rows_of_less)

    def update_all(self, scales: UnitScales | None = None) -> None:
        """Update all units by the numbers that were written for this step, in the order in which forward needs them:
        buckets are filled from the model's end."""
        for unit in reversed(self.units):
            scale = self.one
            if scales is not None:
                scale = scales[unit]
            self.update(unit, scale)

    def update(self, unit: str, scale: Tensor | None = None) -> None:
        """Update the parameters of one unit from their gradients, times `scale`."""
        if scale is None:
            scale = self.one
        for share in reversed(self.shares):
            if share.bucket.unit != unit:
                continue
            row = self.scalars.row_of(share.number)
            rule = self.rule_of(share)
            rule.update(share, scale, row)

    def multiply_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply the rows of parameters by factors of the shape (rows...): each rank its share of the main weights.
        Weights are to be published afterwards."""
        for share in self.shares:
            pieces: list[BucketPiece] = []
            for piece in share.bucket.pieces():
                name = piece.parameter.name
                is_empty = piece.last == 0
                if name in factors and not is_empty:
                    pieces.append(piece)
            if not pieces:
                continue
            storage = share.storage
            main = storage.main_values()
            for piece in pieces:
                factors_of_rows = factors[piece.parameter.name]
                factor = piece.of_rows(factors_of_rows)
                part = main[piece.window]
                part *= factor.to(main.dtype)
            storage.refresh_weights(main)

    def state(self) -> Iterator[StatePiece]:
        """Every piece of state on this rank: (parameter, kind, first, values), the values being those of the flattened
        parameter from `first` on. Loading into them is enough."""
        self.settle()
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
                part = values[piece.window]
                yield piece.parameter, piece.first, part

    def kinds_of(self, share: BucketShare) -> Kinds:
        """Flat values of a share by kind: the rule's state, and main weights where the model's are not."""
        kinds: Kinds = dict(share.state)
        main = share.storage.logical_values()
        if main is not None:
            kinds[MAIN_KIND] = main
        return kinds

    def bytes(self) -> dict[str, int]:
        """Memory of this rank's state by kind."""
        total = Counter[str]()
        for share in self.shares:
            storage = share.storage
            total[MAIN_KIND] += storage.main_weight_bytes()
            for kind, values in share.state.items():
                total[kind] += values.nbytes
        return total


def build_optimizer(buckets: list[Bucket], optim: OptimConfig, kernels: BoundKernels) -> Optimizer:
    """The optimizer of a configuration, for buckets that were filled with its groups."""
    groups = ParameterGroups(optim, kernels)
    return Optimizer(buckets, groups.rules)
