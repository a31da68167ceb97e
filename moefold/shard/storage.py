"""Storage of a bucket's weights: what a Parameter is, what the optimizer updates, what ranks gather, what is saved.

    parameter_view     a Parameter of the model
    main_values        fp32 weights of this rank's share; `refresh_weights` stores new ones and rounds them
    wire_tensors       tensors that publish gathers; `before_gather` is called before, `after_gather` when they are here
    logical_values     main weights as a checkpoint reads and loads them, always fp32
    unheld_values      the model's weights as a checkpoint reads and loads them, where no parameter holds them

Main weights exist on the rank that updates them (ZeRO-1): `open_main_weights` makes them for one share of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest, upper_bfloat16
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES
from moefold.layout.held_blocks import Held
from moefold.shard.block_values import BlockValues, FlatValues, values_in_blocks, whole_values

MoveTensor = Callable[[Tensor], Tensor]
Shape = Sequence[int]


class LogicalValues(Protocol):
    """Flat values that lie in memory otherwise than a checkpoint has them. A slice reads and writes the same memory."""

    dtype: torch.dtype

    def __len__(self) -> int: ...
    def __getitem__(self, window: slice) -> LogicalValues: ...
    def get(self, first: int, last: int) -> Tensor: ...
    def put(self, first: int, last: int, values: Tensor) -> None: ...


SavedValues = Tensor | LogicalValues


class FusedOperands(NamedTuple):
    """Tensors that a fused kernel updates in one pass. `weights` None: there are none beside `main`. `main` as int16:
    the lower bits that bf16 `weights` lack of fp32. `main` as bf16: the model's own, or there are none beside them."""

    main: FlatValues
    weights: Tensor | None


class Wire(NamedTuple):
    """One tensor to gather: this rank's contribution, and where those of all replicas go."""

    gathered: Tensor
    mine: Tensor


class WeightStorage(Protocol):
    weights: Tensor  # flat, in the precision of the model: the parameters are views of it

    def parameter_view(self, start: int, shape: Shape) -> Tensor:
        """The tensor of a Parameter that begins at that element."""
        ...

    def weights_of_share(self, share: slice) -> Tensor:
        """The share's weights, which the optimizer updates."""
        ...

    def open_main_weights(self, share: slice) -> None:
        """Make main weights for this share, from the weights as they are."""
        ...

    def main_values(self) -> Tensor:
        """Main weights of the share in fp32 or better: the live tensor where one exists, else a copy."""
        ...

    def refresh_weights(self, values: Tensor) -> None:
        """Store new main weights, and round them to nearest into the weights of the share."""
        ...

    def fused_operands(self) -> FusedOperands | None:
        """What a fused kernel may update instead of `main_values` and `refresh_weights`; None where it must not."""
        ...

    def before_gather(self, agree: LargestOfReplicas) -> None:
        """Called when the share has been updated, on one replica too."""
        ...

    def wire_tensors(self, share: slice) -> list[Wire]: ...

    def after_gather(self) -> None:
        """Called when everything on the wire has been gathered."""
        ...

    def logical_values(self) -> SavedValues | None:
        """Main weights to save and load; None where the model's own weights are the main weights."""
        ...

    def unheld_values(self) -> SavedValues | None:
        """The model's weights of the share, in the model's dtype; None where the parameters hold them."""
        ...

    def weight_bytes(self) -> int:
        """Memory of the weights that products read."""
        ...

    def main_weight_bytes(self) -> int:
        """Memory of the main weights beyond that of the weights."""
        ...

    def move_main_weights(self, move: MoveTensor) -> None:
        """Replace what is kept of main weights beside the weights by a copy elsewhere."""
        ...


LargestOfReplicas = Callable[[Tensor], Tensor]  # the element-wise maximum over the replicas of a bucket
StorageMaker = Callable[[int, Tensor], WeightStorage]  # (elements, a tensor of the dtype and device wanted)


class FlatWeights:
    """Weights in the precision of the model, gathered in that precision. Storages differ in their main weights."""

    def __init__(self, size: int, like: Tensor):
        self.weights = like.new_zeros(size)

    def parameter_view(self, start: int, shape: Shape) -> Tensor:
        return flat_part(self.weights, start, shape)

    def weights_of_share(self, share: slice) -> Tensor:
        return self.weights[share]

    def before_gather(self, agree: LargestOfReplicas) -> None: ...

    def wire_tensors(self, share: slice) -> list[Wire]:
        weights_of_share = self.weights[share]
        mine = weights_of_share.clone()  # a gather must not read and write the same memory
        return [Wire(self.weights, mine)]

    def after_gather(self) -> None: ...

    def unheld_values(self) -> SavedValues | None:
        return None

    def weight_bytes(self) -> int:
        return self.weights.nbytes


def store_values(values: Tensor, place: Tensor) -> None:
    """Copy values to a place, unless they are there already."""
    if values.data_ptr() != place.data_ptr():
        place.copy_(values)


class PlainWeights(FlatWeights):
    """Main weights are the weights themselves, or an fp32 copy of bf16 weights."""

    def open_main_weights(self, share: slice) -> None:
        self.share_of_weights = self.weights_of_share(share)
        dtype = self.weights.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.main = self.share_of_weights.to(wide)  # the same tensor, where the weights are wide already

    @property
    def has_main_copy(self) -> bool:
        return self.main is not self.share_of_weights

    def main_values(self) -> Tensor:
        return self.main

    def refresh_weights(self, values: Tensor) -> None:
        store_values(values, self.main)
        if self.has_main_copy:
            dtype = self.weights.dtype
            rounded = round_to_nearest(values, dtype)
            self.share_of_weights.copy_(rounded)

    def fused_operands(self) -> FusedOperands:
        weights = None
        if self.has_main_copy:
            weights = self.share_of_weights
        return FusedOperands(self.main, weights)

    def logical_values(self) -> Tensor | None:
        if not self.has_main_copy:
            return None
        return self.main

    def main_weight_bytes(self) -> int:
        if not self.has_main_copy:
            return 0
        return self.main.nbytes

    def move_main_weights(self, move: MoveTensor) -> None:
        if self.has_main_copy:
            self.main = move(self.main)


class SplitFp32Weights(FlatWeights):
    """bf16 weights, and of this rank's share the 16 bits they lack of fp32 (kernels/optimizer/split_fp32.py)."""

    def open_main_weights(self, share: slice) -> None:
        upper = self.weights_of_share(share)
        lower = torch.zeros_like(upper, dtype=torch.int16)
        self.values = SplitValues(upper, lower)

    def main_values(self) -> Tensor:
        return self.values.get(0, len(self.values))

    def refresh_weights(self, values: Tensor) -> None:
        self.values.put(0, len(self.values), values)

    def fused_operands(self) -> FusedOperands:
        values = self.values
        return FusedOperands(values.lower, values.upper)

    def logical_values(self) -> LogicalValues:
        return self.values

    def main_weight_bytes(self) -> int:
        return self.values.lower.nbytes

    def move_main_weights(self, move: MoveTensor) -> None:
        values = self.values
        values.lower = move(values.lower)


class BlockMainWeights(FlatWeights):
    """bf16 weights, and of this rank's share main weights in blocks, to which they are the nearest."""

    def __init__(self, size: int, like: Tensor, main: str):
        super().__init__(size, like)
        self.type = main

    def open_main_weights(self, share: slice) -> None:
        self.share_of_weights = self.weights_of_share(share)
        self.main = values_in_blocks(self.type, self.share_of_weights)

    def main_values(self) -> Tensor:
        return whole_values(self.main)

    def refresh_weights(self, values: Tensor) -> None:
        self.main.put(0, len(values), values)
        held = whole_values(self.main)
        rounded = round_to_nearest(held, self.weights.dtype)
        self.share_of_weights.copy_(rounded)

    def fused_operands(self) -> FusedOperands:
        return FusedOperands(self.main, self.share_of_weights)

    def logical_values(self) -> BlockValues:
        return self.main

    def main_weight_bytes(self) -> int:
        return self.main.nbytes

    def move_main_weights(self, move: MoveTensor) -> None:
        self.main = self.main.moved(move)


@dataclass
class SplitValues:
    """fp32 values kept as bf16 and 16 further bits. They are joined and split window by window."""

    upper: Tensor
    lower: Tensor
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.upper)

    def __getitem__(self, window: slice) -> SplitValues:
        upper = self.upper[window]
        lower = self.lower[window]
        return SplitValues(upper, lower)

    def get(self, first: int, last: int) -> Tensor:
        window = self[first:last]
        upper = window.upper
        lower = window.lower.to(upper.device)
        return joined_fp32(upper, lower)

    def put(self, first: int, last: int, values: Tensor) -> None:
        window = self[first:last]
        device = window.upper.device
        wide = values.to(device, self.dtype)
        window.upper.copy_(upper_bfloat16(wide))
        window.lower.copy_(lower_16_bits(wide))


class ShardedWeights(FlatWeights):
    """Weights of which a rank keeps its share. The flat tensor has memory while its unit is here, and its parameters
    have values once the shares of all replicas are gathered (shard/gathered_units.py). Its address may be another each
    time, but views of it stay views: memory is given to and taken from one storage object."""

    own: Tensor | None = None

    def weights_of_share(self, share: slice, copy: MoveTensor = torch.clone) -> Tensor:
        if self.own is None:
            mine = self.weights[share]
            self.own = copy(mine)
        return self.own

    def keep_share(self, share: slice, copy: MoveTensor = torch.clone) -> Held:
        """This rank's share, of which it keeps this copy."""
        return self.weights_of_share(share, copy)

    def free_weights(self) -> None:
        """Free all but the share."""
        memory = self.weights.untyped_storage()
        memory.resize_(0)

    def gathered_memory(self) -> list[Tensor]:
        """What gathers write to."""
        return [self.weights]

    def forget_gathered(self) -> None:
        """The memory of what was gathered is taken."""
        return

    def held_weights(self, share: slice) -> Tensor | None:
        """The weights of the share that this rank keeps; None where it keeps them in another form."""
        return self.weights_of_share(share)

    def gathered_tensors(self) -> list[Tensor]:
        """What has memory while the unit is here."""
        return self.gathered_memory()

    def wire_tensors(self, share: slice) -> list[Wire]:
        mine = self.weights_of_share(share)
        return [Wire(self.weights, mine)]

    def weight_bytes(self) -> int:
        """Memory between steps."""
        if self.own is None:
            return 0
        return self.own.nbytes


class RoundedWeights(FlatWeights):
    """bf16 weights that are main weights themselves: what an update adds below their resolution is kept in the mean, by
    stochastic rounding (kernels/optimizer/adamw.py). Other changes are rounded to nearest."""

    def open_main_weights(self, share: slice) -> None:
        self.share_of_weights = self.weights_of_share(share)

    def main_values(self) -> Tensor:
        return self.share_of_weights.float()

    def refresh_weights(self, values: Tensor) -> None:
        dtype = self.weights.dtype
        rounded = round_to_nearest(values, dtype)
        self.share_of_weights.copy_(rounded)

    def fused_operands(self) -> FusedOperands:
        return FusedOperands(self.share_of_weights, None)

    def logical_values(self) -> None:
        return None

    def main_weight_bytes(self) -> int:
        return 0

    def move_main_weights(self, move: MoveTensor) -> None: ...


def storage_maker(main: str) -> StorageMaker:
    """The storage of bf16 weights for a setting of `optim.main`. Weights that are wider are stored plainly."""

    def make_storage(size: int, like: Tensor) -> WeightStorage:
        if like.dtype != torch.bfloat16:
            return PlainWeights(size, like)
        make = STORAGES[main]
        return make(size, like)

    return make_storage


def sharded_storage_maker(main: str) -> StorageMaker:
    """The storage of fully sharded weights, as `storage_maker` has it for whole ones."""

    def make_storage(size: int, like: Tensor) -> WeightStorage:
        if like.dtype != torch.bfloat16:
            return ShardedPlainWeights(size, like)
        make = SHARDED_STORAGES[main]
        return make(size, like)

    return make_storage


class ShardedPlainWeights(ShardedWeights, PlainWeights): ...


class ShardedSplitWeights(ShardedWeights, SplitFp32Weights): ...


class ShardedBlockMainWeights(ShardedWeights, BlockMainWeights): ...


class ShardedRoundedWeights(ShardedWeights, RoundedWeights): ...


STORAGES: dict[str, StorageMaker] = {
    "fp32": PlainWeights,
    "split": SplitFp32Weights,
    "bf16": RoundedWeights,
    "none": RoundedWeights,
}
SHARDED_STORAGES: dict[str, StorageMaker] = {
    "fp32": ShardedPlainWeights,
    "split": ShardedSplitWeights,
    "bf16": ShardedRoundedWeights,
    "none": ShardedRoundedWeights,
}
STORAGES |= {name: partial(BlockMainWeights, main=name) for name in CODE_DTYPES}
SHARDED_STORAGES |= {name: partial(ShardedBlockMainWeights, main=name) for name in CODE_DTYPES}


def flat_part(flat: Tensor, start: int, shape: Shape) -> Tensor:
    stop = start + prod(shape)
    part = flat[start:stop]
    return part.view(tuple(shape))
